// Tensors of the contract from and to plain arrays.
//
//   v1::Tensor x = MakeTensor(points, {n, d});                    // std::vector<float> points, copied once
//   absl::Span<const float> f = *View<float>(response.f());       // no copy; f lives as long as the response
//   std::vector<double> g = *ToDoubles(response.g());             // any dtype
#ifndef SINKHORN_CLIENT_CPP_TENSOR_H_
#define SINKHORN_CLIENT_CPP_TENSOR_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn::client {

namespace v1 = ::sinkhorn::v1;

// Makes a row-major tensor of `dtype`, rounding to nearest (half precision: through float32). The product of `shape`
// should be values.size(); where it is not, the server refuses the request and names the tensor.
v1::Tensor MakeTensor(absl::Span<const float> values, absl::Span<const int64_t> shape,
                      v1::DataType dtype = v1::DATA_TYPE_FLOAT32);
v1::Tensor MakeTensor(absl::Span<const double> values, absl::Span<const int64_t> shape,
                      v1::DataType dtype = v1::DATA_TYPE_FLOAT64);

// Bytes of an element; 0 for DATA_TYPE_UNSPECIFIED and unknown values.
int64_t SizeOf(v1::DataType dtype);

// Product of the extents. INVALID_ARGUMENT: a negative extent, or a product beyond 2^62.
absl::StatusOr<int64_t> ElementCount(absl::Span<const int64_t> shape);
absl::StatusOr<int64_t> ElementCount(const v1::Tensor& tensor);

// OK if dtype, shape and the number of bytes agree.
absl::Status CheckTensor(const v1::Tensor& tensor);

// The elements in place, without a copy: float for FLOAT32, double for FLOAT64, uint16_t for the bits of FLOAT16 and
// BFLOAT16. Valid while `tensor` lives unchanged. INVALID_ARGUMENT: another dtype, or a tensor that is not whole.
template <typename T>
absl::StatusOr<absl::Span<const T>> View(const v1::Tensor& tensor);

// The elements, converted from any dtype. INVALID_ARGUMENT: a tensor that is not whole.
absl::StatusOr<std::vector<float>> ToFloats(const v1::Tensor& tensor);
absl::StatusOr<std::vector<double>> ToDoubles(const v1::Tensor& tensor);

// The same values as another dtype.
absl::StatusOr<v1::Tensor> Convert(const v1::Tensor& tensor, v1::DataType dtype);

// Half precision, round to nearest even; overflow gives infinity.
uint16_t FloatToHalf(float value);
float HalfToFloat(uint16_t bits);
uint16_t FloatToBFloat16(float value);
float BFloat16ToFloat(uint16_t bits);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CPP_TENSOR_H_
