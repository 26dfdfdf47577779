#include "client/cli/array_input.h"

#include <cerrno>
#include <fstream>
#include <sstream>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cpp/npy.h"
#include "client/cpp/tensor.h"

namespace sinkhorn::client {
namespace {

bool IsText(const std::string& path) {
  return absl::EndsWith(path, ".csv") || absl::EndsWith(path, ".tsv") || absl::EndsWith(path, ".txt");
}

absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  std::stringstream buffer;
  buffer << file.rdbuf();
  return buffer.str();
}

absl::Status WithContext(absl::string_view context, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(context, ": ", status.message()));
}

std::vector<int64_t> ShapeOf(int64_t rows, int64_t columns, int min_rank) {
  if (min_rank == 3) return {1, rows, columns};
  if (min_rank == 0 && rows == 1 && columns == 1) return {};
  if (min_rank <= 1 && (rows == 1 || columns == 1)) return {rows * columns};
  return {rows, columns};
}

}  // namespace

absl::StatusOr<v1::Tensor> ParseText(absl::string_view text, char row_separator, int min_rank) {
  std::vector<float> values;
  int64_t rows = 0, columns = 0, line = 0;
  for (absl::string_view row : absl::StrSplit(text, row_separator)) {
    ++line;
    row = absl::StripAsciiWhitespace(row.substr(0, row.find('#')));
    if (row.empty()) continue;
    int64_t count = 0;
    for (absl::string_view cell : absl::StrSplit(row, absl::ByAnyChar(", \t"), absl::SkipWhitespace())) {
      float value;
      if (!absl::SimpleAtof(cell, &value)) {
        return absl::InvalidArgumentError(absl::StrCat("row ", line, ": '", cell, "' is not a number"));
      }
      values.push_back(value);
      ++count;
    }
    if (rows > 0 && count != columns) {
      return absl::InvalidArgumentError(
          absl::StrCat("row ", line, " has ", count, " numbers where the rows before it have ", columns));
    }
    columns = count;
    ++rows;
  }
  if (values.empty()) return absl::InvalidArgumentError("no numbers");
  return MakeTensor(values, ShapeOf(rows, columns, min_rank));
}

absl::StatusOr<v1::Tensor> ReadArray(const std::string& value, int min_rank) {
  if (absl::EndsWith(value, ".npy")) {
    absl::StatusOr<v1::Tensor> tensor = ReadNpy(value);
    // An error of the file system names the file already.
    if (tensor.status().code() == absl::StatusCode::kInvalidArgument) return WithContext(value, tensor.status());
    return tensor;
  }
  if (IsText(value)) {
    const absl::StatusOr<std::string> text = ReadWhole(value);
    if (!text.ok()) return text.status();
    absl::StatusOr<v1::Tensor> tensor = ParseText(*text, '\n', min_rank);
    if (!tensor.ok()) return WithContext(value, tensor.status());
    return tensor;
  }
  absl::StatusOr<v1::Tensor> tensor = ParseText(value, ';', min_rank);
  if (!tensor.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", value, "' is neither a .npy, .csv, .tsv or .txt file nor numbers such as 0,1;1,0 (",
                     tensor.status().message(), ")"));
  }
  return tensor;
}

}  // namespace sinkhorn::client
