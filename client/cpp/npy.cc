// .npy: magic, version, header length, a Python dictionary as text, then the raw elements.
#include "client/cpp/npy.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/types/optional.h"
#include "client/cpp/tensor.h"

namespace sinkhorn::client {
namespace {

constexpr absl::string_view kMagic("\x93NUMPY", 6);
constexpr size_t kAlignment = 64;  // Elements start at a multiple of it.

struct Header {
  std::string descr;
  bool fortran_order = false;
  std::vector<int64_t> shape;
};

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("not a valid .npy file: ", what));
}

// ---- The header's dictionary: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), } ----

void SkipSpace(absl::string_view* text) { *text = absl::StripLeadingAsciiWhitespace(*text); }

// Takes `token` off the front, after white space.
bool Take(absl::string_view token, absl::string_view* text) {
  SkipSpace(text);
  return absl::ConsumePrefix(text, token);
}

absl::optional<std::string> TakeString(absl::string_view* text) {
  SkipSpace(text);
  if (text->empty() || (text->front() != '\'' && text->front() != '"')) return absl::nullopt;
  const size_t end = text->find(text->front(), 1);
  if (end == absl::string_view::npos) return absl::nullopt;
  std::string value(text->substr(1, end - 1));
  text->remove_prefix(end + 1);
  return value;
}

bool TakeShape(absl::string_view* text, std::vector<int64_t>* shape) {
  if (!Take("(", text)) return false;
  while (!Take(")", text)) {
    SkipSpace(text);
    const size_t digits = std::min(text->find_first_not_of("0123456789"), text->size());
    int64_t extent = 0;
    if (!absl::SimpleAtoi(text->substr(0, digits), &extent)) return false;
    text->remove_prefix(digits);
    shape->push_back(extent);
    if (!Take(",", text)) return Take(")", text);
  }
  return true;
}

absl::StatusOr<Header> ParseHeader(absl::string_view text) {
  Header header;
  bool has_descr = false, has_order = false, has_shape = false;
  if (!Take("{", &text)) return Malformed("the header is not a dictionary");
  while (!Take("}", &text)) {
    const absl::optional<std::string> key = TakeString(&text);
    if (!key || !Take(":", &text)) return Malformed("the header is not a dictionary");
    if (*key == "descr") {
      const absl::optional<std::string> descr = TakeString(&text);
      if (!descr) return absl::InvalidArgumentError("structured arrays are not supported: save a plain float array");
      header.descr = *descr;
      has_descr = true;
    } else if (*key == "fortran_order") {
      header.fortran_order = Take("True", &text);
      if (!header.fortran_order && !Take("False", &text)) return Malformed("fortran_order is neither True nor False");
      has_order = true;
    } else if (*key == "shape") {
      if (!TakeShape(&text, &header.shape)) return Malformed("the shape is not a tuple of integers");
      has_shape = true;
    } else {
      return Malformed(absl::StrCat("unknown key '", *key, "' in the header"));
    }
    if (!Take(",", &text)) {
      if (!Take("}", &text)) return Malformed("the header is not a dictionary");
      break;
    }
  }
  if (!has_descr || !has_order || !has_shape) return Malformed("the header lacks descr, fortran_order or shape");
  return header;
}

absl::StatusOr<v1::DataType> TypeOf(absl::string_view descr) {
  if (descr == "<f4") return v1::DATA_TYPE_FLOAT32;
  if (descr == "<f8") return v1::DATA_TYPE_FLOAT64;
  if (descr == "<f2") return v1::DATA_TYPE_FLOAT16;
  if (absl::StartsWith(descr, ">")) {
    return absl::InvalidArgumentError(absl::StrCat("dtype '", descr, "' is big-endian: save array.astype('",
                                                   absl::StrCat("<", descr.substr(1)), "')"));
  }
  return absl::InvalidArgumentError(absl::StrCat("dtype '", descr,
                                                 "' must be float16, float32 or float64, little-endian "
                                                 "('<f2', '<f4', '<f8'): save array.astype('float32')"));
}

// The tensor that `header` promises, without its elements. `bytes`: how many follow.
absl::StatusOr<v1::Tensor> TensorFor(const Header& header) {
  const absl::StatusOr<v1::DataType> dtype = TypeOf(header.descr);
  if (!dtype.ok()) return dtype.status();
  if (header.fortran_order) {
    return absl::InvalidArgumentError("Fortran order is not supported: save numpy.ascontiguousarray(array)");
  }
  v1::Tensor tensor;
  tensor.set_dtype(*dtype);
  for (int64_t extent : header.shape) tensor.add_shape(extent);
  return tensor;
}

// Version and header length of the file that starts with these bytes.
struct Preamble {
  size_t header_begin = 0;
  size_t data_begin = 0;
};
constexpr size_t kPreambleMax = 12;

absl::StatusOr<Preamble> ParsePreamble(absl::string_view bytes) {
  if (!absl::StartsWith(bytes, kMagic)) return Malformed("it does not begin with \\x93NUMPY");
  if (bytes.size() < 8) return Malformed("it ends within the version");
  const int major = static_cast<unsigned char>(bytes[6]);
  if (major != 1 && major != 2) {
    return absl::InvalidArgumentError(absl::StrCat(".npy version ", major, " is not supported: 1 and 2 are"));
  }
  const size_t width = major == 1 ? 2 : 4;
  if (bytes.size() < 8 + width) return Malformed("it ends within the header's length");
  size_t length = 0;
  for (size_t i = 0; i < width; ++i) length |= size_t{static_cast<unsigned char>(bytes[8 + i])} << (8 * i);
  if (length > (size_t{1} << 20)) return Malformed(absl::StrCat("a header of ", length, " bytes"));
  return Preamble{8 + width, 8 + width + length};
}

// OK if `actual` bytes are what the tensor's shape and dtype need; sets `bytes` to that.
absl::Status CheckLength(const v1::Tensor& tensor, uint64_t actual) {
  const absl::StatusOr<int64_t> count = ElementCount(tensor);
  if (!count.ok()) return count.status();
  const uint64_t element = static_cast<uint64_t>(SizeOf(tensor.dtype()));
  if (actual % element == 0 && actual / element == static_cast<uint64_t>(*count)) return absl::OkStatus();
  return Malformed(
      absl::StrCat(*count, " elements of ", element, " bytes should follow the header; ", actual, " bytes do"));
}

absl::Status FileError(absl::string_view action, const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", action, " ", path));
}

}  // namespace

absl::StatusOr<v1::Tensor> ParseNpy(absl::string_view bytes) {
  const absl::StatusOr<Preamble> preamble = ParsePreamble(bytes);
  if (!preamble.ok()) return preamble.status();
  if (bytes.size() < preamble->data_begin) return Malformed("it ends within the header");
  const absl::StatusOr<Header> header =
      ParseHeader(bytes.substr(preamble->header_begin, preamble->data_begin - preamble->header_begin));
  if (!header.ok()) return header.status();
  absl::StatusOr<v1::Tensor> tensor = TensorFor(*header);
  if (!tensor.ok()) return tensor.status();
  bytes.remove_prefix(preamble->data_begin);
  if (absl::Status status = CheckLength(*tensor, bytes.size()); !status.ok()) return status;
  tensor->set_data(bytes.data(), bytes.size());
  return tensor;
}

// Reads the elements straight into the tensor: a file may be large, and is in memory once.
absl::StatusOr<v1::Tensor> ReadNpy(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return FileError("open", path);
  const std::streamoff size = file.tellg();
  if (size < 0) return FileError("read", path);
  file.seekg(0);
  std::string start(std::min<size_t>(kPreambleMax, static_cast<size_t>(size)), '\0');
  file.read(start.data(), static_cast<std::streamsize>(start.size()));
  const absl::StatusOr<Preamble> preamble = ParsePreamble(start);
  if (!preamble.ok()) return preamble.status();
  if (static_cast<size_t>(size) < preamble->data_begin) return Malformed("it ends within the header");

  std::string text(preamble->data_begin - preamble->header_begin, '\0');
  file.seekg(static_cast<std::streamoff>(preamble->header_begin));
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  const absl::StatusOr<Header> header = ParseHeader(text);
  if (!header.ok()) return header.status();
  absl::StatusOr<v1::Tensor> tensor = TensorFor(*header);
  if (!tensor.ok()) return tensor.status();
  const size_t bytes = static_cast<size_t>(size) - preamble->data_begin;
  if (absl::Status status = CheckLength(*tensor, bytes); !status.ok()) return status;
  tensor->mutable_data()->resize(bytes);
  file.read(tensor->mutable_data()->data(), static_cast<std::streamsize>(bytes));
  if (!file) return FileError("read", path);
  return tensor;
}

absl::StatusOr<std::string> FormatNpy(const v1::Tensor& tensor) {
  if (absl::Status status = CheckTensor(tensor); !status.ok()) return status;
  if (tensor.dtype() == v1::DATA_TYPE_BFLOAT16) {
    const absl::StatusOr<v1::Tensor> wide = Convert(tensor, v1::DATA_TYPE_FLOAT32);
    if (!wide.ok()) return wide.status();
    return FormatNpy(*wide);
  }
  std::string shape;
  for (int64_t extent : tensor.shape()) absl::StrAppend(&shape, shape.empty() ? "" : " ", extent, ",");
  if (tensor.shape_size() > 1) shape.pop_back();  // (3, 4), but (3,)
  std::string header =
      absl::StrCat("{'descr': '<f", SizeOf(tensor.dtype()), "', 'fortran_order': False, 'shape': (", shape, "), }");
  const bool long_header = header.size() + kAlignment > 0xffff;
  const size_t width = long_header ? 4 : 2;
  const size_t unpadded = kMagic.size() + 2 + width + header.size() + 1;
  header.append((kAlignment - unpadded % kAlignment) % kAlignment, ' ');
  header.push_back('\n');

  std::string bytes(kMagic);
  bytes.push_back(long_header ? 2 : 1);
  bytes.push_back(0);
  for (size_t i = 0; i < width; ++i) bytes.push_back(static_cast<char>(header.size() >> (8 * i) & 0xff));
  return absl::StrCat(bytes, header, tensor.data());
}

absl::Status WriteNpy(const std::string& path, const v1::Tensor& tensor) {
  const absl::StatusOr<std::string> bytes = FormatNpy(tensor);
  if (!bytes.ok()) return bytes.status();
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  if (!file) return FileError("create", temporary);
  file.write(bytes->data(), static_cast<std::streamsize>(bytes->size()));
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const absl::Status status = FileError("write", path);
    std::remove(temporary.c_str());
    return status;
  }
  return absl::OkStatus();
}

}  // namespace sinkhorn::client
