#include "server/tensor_check.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/validate.h"
#include "server/wire.h"

namespace sinkhorn {
namespace {

using absl::nullopt;
using absl::optional;
using absl::StrCat;

constexpr int64_t kSaturated = std::numeric_limits<int64_t>::max();

std::string ShapeText(const v1::Tensor& tensor) {
  if (tensor.shape_size() > kMaxRank) return StrCat(tensor.shape_size(), " dimensions");
  return StrCat("[", absl::StrJoin(tensor.shape(), ", "), "]");
}

// "[..., n, d = 3]": what was expected, with the extents known already.
std::string CoreText(std::initializer_list<Extent> core) {
  std::string text = "[...";
  for (const Extent& extent : core) {
    absl::StrAppend(&text, ", ", extent.name);
    if (*extent.value > 0) absl::StrAppend(&text, " = ", *extent.value);
  }
  return text + "]";
}

const char* RuleText(ElementRule rule) {
  switch (rule) {
    case ElementRule::kFinite:
      return "must be finite";
    case ElementRule::kFiniteNonNegative:
      return "must be finite and >= 0";
    case ElementRule::kFinitePositive:
      return "must be finite and > 0";
    case ElementRule::kNotNan:
      return "must be a number";
  }
  return "";
}

}  // namespace

int64_t SaturatingProduct(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? kSaturated : product;
}

int64_t SaturatingSum(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? kSaturated : sum;
}

optional<DType> FromProto(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT32:
      return DType::kFloat32;
    case v1::DATA_TYPE_FLOAT64:
      return DType::kFloat64;
    case v1::DATA_TYPE_FLOAT16:
      return DType::kFloat16;
    case v1::DATA_TYPE_BFLOAT16:
      return DType::kBFloat16;
    default:
      return nullopt;
  }
}

v1::DataType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return v1::DATA_TYPE_FLOAT32;
    case DType::kFloat64:
      return v1::DATA_TYPE_FLOAT64;
    case DType::kFloat16:
      return v1::DATA_TYPE_FLOAT16;
    case DType::kBFloat16:
      return v1::DATA_TYPE_BFLOAT16;
  }
  return v1::DATA_TYPE_UNSPECIFIED;
}

optional<Error> TensorCheck::Add(absl::string_view field, const v1::Tensor& tensor, std::initializer_list<Extent> core,
                                 ElementRule rule, TensorView* view) {
  const optional<DType> dtype = FromProto(tensor.dtype());
  if (!dtype.has_value()) {
    return InvalidField(StrCat(field, ".dtype"), "must be FLOAT32, FLOAT64, FLOAT16 or BFLOAT16",
                        StrCat(tensor.dtype()));
  }

  // 1. The shape: few enough extents, each >= 1, ending in what the field says.
  const std::string shape_field = StrCat(field, ".shape");
  const int leading_rank = tensor.shape_size() - static_cast<int>(core.size());
  if (tensor.shape_size() > kMaxRank) {
    return InvalidField(shape_field, StrCat("must have at most ", kMaxRank, " dimensions"), ShapeText(tensor));
  }
  if (leading_rank < 0) return InvalidField(shape_field, StrCat("must be ", CoreText(core)), ShapeText(tensor));
  int64_t elements = 1;
  for (int64_t extent : tensor.shape()) {
    if (extent < 1) return InvalidField(shape_field, "must have extents >= 1", ShapeText(tensor));
    elements = SaturatingProduct(elements, extent);
  }
  int axis = leading_rank;
  for (const Extent& extent : core) {
    const int64_t actual = tensor.shape(axis++);
    if (*extent.value != 0 && *extent.value != actual) {
      return InvalidField(shape_field, StrCat("must be ", CoreText(core)), ShapeText(tensor));
    }
  }
  axis = leading_rank;
  for (const Extent& extent : core) *extent.value = tensor.shape(axis++);
  if (optional<Error> error = CheckBatch(shape_field, tensor, leading_rank)) return error;

  // 2. The length.
  const absl::string_view data = TensorData(bytes_, tensor);
  const int64_t bytes = SaturatingProduct(elements, static_cast<int64_t>(SizeOf(*dtype)));
  if (bytes == kSaturated) return TooLarge(shape_field, "product(shape) * sizeof(dtype)", kSaturated - 1, kSaturated);
  if (static_cast<int64_t>(data.size()) != bytes) {
    return InvalidField(StrCat(field, ".data"), StrCat("must have product(shape) * sizeof(dtype) = ", bytes, " bytes"),
                        StrCat(data.size(), " bytes"));
  }

  view->dtype = *dtype;
  view->data = data.data();
  view->shared = leading_rank == 0;
  added_.push_back({std::string(field), *view, elements, rule});
  total_bytes_ = SaturatingSum(total_bytes_, bytes);
  return nullopt;
}

optional<Error> TensorCheck::CheckBatch(const std::string& shape_field, const v1::Tensor& tensor, int leading_rank) {
  if (leading_rank == 0) return nullopt;
  const auto begin = tensor.shape().begin(), end = begin + leading_rank;
  if (leading_.empty()) {
    leading_.assign(begin, end);
    leading_owner_ = shape_field;
    return nullopt;
  }
  if (std::equal(begin, end, leading_.begin(), leading_.end())) return nullopt;
  return InvalidField(shape_field,
                      StrCat("must have no leading dimensions, or those of ", leading_owner_, ": [",
                             absl::StrJoin(leading_, ", "), "]"),
                      ShapeText(tensor));
}

int64_t TensorCheck::count() const {
  int64_t count = 1;
  for (int64_t extent : leading_) count = SaturatingProduct(count, extent);
  return count;
}

optional<Error> TensorCheck::Scan() const {
  for (const Added& tensor : added_) {
    const int64_t index = FirstViolation(tensor.view, tensor.elements, tensor.rule);
    if (index < 0) continue;
    Error error = InvalidField(StrCat(tensor.field, ".data"), RuleText(tensor.rule),
                               StrCat(Element(tensor.view, index), " at element ", index));
    error.metadata.emplace_back("element", StrCat(index));
    return error;
  }
  return nullopt;
}

}  // namespace sinkhorn
