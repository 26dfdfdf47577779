// Tensors from and to plain arrays: byte copies where the type is the same, one loop where it is not.
#include "client/cpp/tensor.h"

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace sinkhorn::client {
namespace {

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tensors are little-endian: this client needs a little-endian machine"
#endif

uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Writes `values` as elements of type To, each through `convert`.
template <typename To, typename From, typename Function>
void Fill(absl::Span<const From> values, Function convert, std::string* data) {
  data->resize(values.size() * sizeof(To));
  char* out = data->data();
  for (size_t i = 0; i < values.size(); ++i) {
    const To element = convert(values[i]);
    std::memcpy(out + i * sizeof(To), &element, sizeof(To));
  }
}

template <typename From>
v1::Tensor Make(absl::Span<const From> values, absl::Span<const int64_t> shape, v1::DataType dtype) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  for (int64_t extent : shape) tensor.add_shape(extent);
  std::string* data = tensor.mutable_data();
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT32:
      Fill<float>(
          values, [](From v) { return static_cast<float>(v); }, data);
      break;
    case v1::DATA_TYPE_FLOAT64:
      Fill<double>(
          values, [](From v) { return static_cast<double>(v); }, data);
      break;
    case v1::DATA_TYPE_FLOAT16:
      Fill<uint16_t>(
          values, [](From v) { return FloatToHalf(static_cast<float>(v)); }, data);
      break;
    case v1::DATA_TYPE_BFLOAT16:
      Fill<uint16_t>(
          values, [](From v) { return FloatToBFloat16(static_cast<float>(v)); }, data);
      break;
    default:  // Not a type: left empty, which every reader refuses.
      break;
  }
  return tensor;
}

template <typename To>
absl::StatusOr<std::vector<To>> ToVector(const v1::Tensor& tensor) {
  if (absl::Status status = CheckTensor(tensor); !status.ok()) return status;
  const size_t size = static_cast<size_t>(SizeOf(tensor.dtype()));
  std::vector<To> values(tensor.data().size() / size);
  const char* data = tensor.data().data();
  for (size_t i = 0; i < values.size(); ++i, data += size) {
    if (tensor.dtype() == v1::DATA_TYPE_FLOAT32) {
      float element;
      std::memcpy(&element, data, sizeof(element));
      values[i] = static_cast<To>(element);
    } else if (tensor.dtype() == v1::DATA_TYPE_FLOAT64) {
      double element;
      std::memcpy(&element, data, sizeof(element));
      values[i] = static_cast<To>(element);
    } else {
      uint16_t bits;
      std::memcpy(&bits, data, sizeof(bits));
      values[i] = tensor.dtype() == v1::DATA_TYPE_FLOAT16 ? HalfToFloat(bits) : BFloat16ToFloat(bits);
    }
  }
  return values;
}

bool Holds(const float*, v1::DataType dtype) { return dtype == v1::DATA_TYPE_FLOAT32; }
bool Holds(const double*, v1::DataType dtype) { return dtype == v1::DATA_TYPE_FLOAT64; }
bool Holds(const uint16_t*, v1::DataType dtype) {
  return dtype == v1::DATA_TYPE_FLOAT16 || dtype == v1::DATA_TYPE_BFLOAT16;
}

}  // namespace

v1::Tensor MakeTensor(absl::Span<const float> values, absl::Span<const int64_t> shape, v1::DataType dtype) {
  return Make(values, shape, dtype);
}

v1::Tensor MakeTensor(absl::Span<const double> values, absl::Span<const int64_t> shape, v1::DataType dtype) {
  return Make(values, shape, dtype);
}

int64_t SizeOf(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT32:
      return 4;
    case v1::DATA_TYPE_FLOAT64:
      return 8;
    case v1::DATA_TYPE_FLOAT16:
      return 2;
    case v1::DATA_TYPE_BFLOAT16:
      return 2;
    default:
      return 0;
  }
}

absl::StatusOr<int64_t> ElementCount(absl::Span<const int64_t> shape) {
  constexpr int64_t kMax = int64_t{1} << 62;
  int64_t count = 1;
  for (int64_t extent : shape) {
    if (extent < 0 || (extent > 0 && count > kMax / extent)) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape [", absl::StrJoin(shape, ", "), "] must have extents >= 0 and at most 2^62 elements"));
    }
    count *= extent;
  }
  return count;
}

absl::StatusOr<int64_t> ElementCount(const v1::Tensor& tensor) {
  return ElementCount(absl::MakeConstSpan(tensor.shape().data(), static_cast<size_t>(tensor.shape_size())));
}

absl::Status CheckTensor(const v1::Tensor& tensor) {
  const int64_t size = SizeOf(tensor.dtype());
  if (size == 0) return absl::InvalidArgumentError(absl::StrCat("unknown dtype ", tensor.dtype()));
  const absl::StatusOr<int64_t> count = ElementCount(tensor);
  if (!count.ok()) return count.status();
  const uint64_t bytes = tensor.data().size();
  if (bytes % size != 0 || bytes / size != static_cast<uint64_t>(*count)) {
    return absl::InvalidArgumentError(absl::StrCat("data must have ", *count, " elements of ", size,
                                                   " bytes for shape [", absl::StrJoin(tensor.shape(), ", "), "]; got ",
                                                   bytes, " bytes"));
  }
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<absl::Span<const T>> View(const v1::Tensor& tensor) {
  if (absl::Status status = CheckTensor(tensor); !status.ok()) return status;
  if (!Holds(static_cast<const T*>(nullptr), tensor.dtype())) {
    return absl::InvalidArgumentError(
        absl::StrCat("a tensor of ", v1::DataType_Name(tensor.dtype()), " cannot be viewed as this type"));
  }
  // std::string's buffer is aligned for every T here: it comes from operator new or lies 8-aligned inside the string.
  return absl::MakeConstSpan(reinterpret_cast<const T*>(tensor.data().data()), tensor.data().size() / sizeof(T));
}
template absl::StatusOr<absl::Span<const float>> View<float>(const v1::Tensor&);
template absl::StatusOr<absl::Span<const double>> View<double>(const v1::Tensor&);
template absl::StatusOr<absl::Span<const uint16_t>> View<uint16_t>(const v1::Tensor&);

absl::StatusOr<std::vector<float>> ToFloats(const v1::Tensor& tensor) { return ToVector<float>(tensor); }
absl::StatusOr<std::vector<double>> ToDoubles(const v1::Tensor& tensor) { return ToVector<double>(tensor); }

absl::StatusOr<v1::Tensor> Convert(const v1::Tensor& tensor, v1::DataType dtype) {
  if (tensor.dtype() == dtype) return tensor;
  if (SizeOf(dtype) == 0) return absl::InvalidArgumentError(absl::StrCat("unknown dtype ", dtype));
  const absl::StatusOr<std::vector<double>> values = ToDoubles(tensor);
  if (!values.ok()) return values.status();
  return MakeTensor(*values, absl::MakeConstSpan(tensor.shape().data(), static_cast<size_t>(tensor.shape_size())),
                    dtype);
}

uint16_t FloatToHalf(float value) {
  const uint32_t bits = BitsOf(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;   // NaN
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity.
  if (magnitude < 0x38800000) {                       // Subnormal in half precision: units of 2^-24.
    // Adding 0.5 leaves value / 2^-24 in the low mantissa bits, rounded to nearest even by the addition.
    return sign | static_cast<uint16_t>(BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f));
  }
  const uint32_t odd = (magnitude >> 13) & 1;  // Ties go to even.
  return sign | static_cast<uint16_t>((magnitude - (112u << 23) + 0xfff + odd) >> 13);
}

float HalfToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return FloatOf(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) return FloatOf(sign | BitsOf(static_cast<float>(magnitude) * 0x1p-24f));
  return FloatOf(sign | ((magnitude << 13) + (112u << 23)));
}

uint16_t FloatToBFloat16(float value) {
  const uint32_t bits = BitsOf(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN stays one.
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float BFloat16ToFloat(uint16_t bits) { return FloatOf(static_cast<uint32_t>(bits) << 16); }

}  // namespace sinkhorn::client
