#include "server/line_file.h"

#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace sinkhorn {
namespace {

constexpr absl::Duration kRefresh = absl::Seconds(2);

}  // namespace

absl::Status LineFile::Read(absl::FunctionRef<std::string(std::string line)> take) const {
  std::ifstream file(path_);
  if (!file) return absl::InvalidArgumentError(absl::StrCat(name_, " cannot be read"));
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    absl::StripAsciiWhitespace(&line);
    if (line.empty() || line[0] == '#') continue;
    const std::string rule = take(std::move(line));
    if (!rule.empty()) return absl::InvalidArgumentError(absl::StrCat(name_, ": line ", number, " must be ", rule));
  }
  return absl::OkStatus();
}

bool LineFile::IsDue(absl::Time now) {
  int64_t due = due_ns_.load(std::memory_order_relaxed);
  if (absl::ToUnixNanos(now) < due) return false;
  return due_ns_.compare_exchange_strong(due, absl::ToUnixNanos(now + kRefresh)) && due != INT64_MIN;
}

}  // namespace sinkhorn
