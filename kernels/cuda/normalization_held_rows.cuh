// Rows of tensors to a warp's shared memory and back, of any type and alignment: 32 or 16 bytes a lane where the type
// and the side allow it.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_ROWS_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_ROWS_CUH_

#include "kernels/cuda/native.cuh"
#include "kernels/cuda/normalization_held_shape.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// A warp's part of an n x n matrix, from (row, column) on; its rows lie Shape::kWarpColumns apart in the buffer. What
// is outside the matrix is neither read nor written.
template <class Shape>
struct HeldRows {
  const int64_t member;
  const int n, row, column, lane;

  __device__ bool Quads() const { return n % 4 == 0; }  // 4 elements are aligned, and all inside or all outside.

  // Rows [first, first + count), float32 on its way while the caller goes on: until Arrived.
  __device__ void Fetch(const Tensor& tensor, int first, int count, float* buffer) const {
    const int rows = min(count, n - row - first);
    const int64_t at = Place(first);
    if (tensor.dtype != DType::kFloat32) {
      if (tensor.dtype == DType::kBFloat16)
        return FetchShort(static_cast<const __nv_bfloat16*>(tensor.data), at, rows, buffer, tensor.dtype);
      return FetchShort(static_cast<const __half*>(tensor.data), at, rows, buffer, tensor.dtype);
    }
    const float* const from = static_cast<const float*>(tensor.data) + at;
    if (Quads()) return ForQuads<4>(rows, [&](int in, int64_t out) { CopyAsync16(buffer + in, from + out); });
    const uint32_t to = SharedAddress(buffer);
#pragma unroll 2
    for (int k = 0; k < rows; ++k) {
#pragma unroll
      for (int e = 0; e < Shape::C; ++e) {
        const int c = lane + 32 * e;
        if (column + c >= n) continue;
        FetchAsync4(to + 4 * (k * Shape::kWarpColumns + c), from + int64_t{k} * n + c);
      }
    }
  }
  __device__ static void Arrived() {
    WaitForFetches();
    __syncwarp();  // The rows are there.
  }
  // From the buffer, which is free afterwards.
  __device__ void Store(const Output& output, int first, int count, const float* buffer) const {
    __syncwarp();  // The rows are there.
    const int rows = min(count, n - row - first);
    const int64_t at = Place(first);
    if (Quads()) {
      ForQuads<2>(rows, [&](int in, int64_t out) {
        const float4 x = *reinterpret_cast<const float4*>(buffer + in);
        if (output.dtype == DType::kFloat32) {
          __stcs(reinterpret_cast<float4*>(static_cast<float*>(output.data) + at + out), x);
        } else {
          const float both[8] = {x.x, x.y, x.z, x.w};
          const uint4 packed = Pack(output.dtype, both);
          uint16_t* const to = static_cast<uint16_t*>(output.data) + at + out;
          __stcs(reinterpret_cast<uint2*>(to), make_uint2(packed.x, packed.y));
        }
      });
    } else {
#pragma unroll 1
      for (int k = 0; k < rows; ++k) {
#pragma unroll 2
        for (int c = lane; c < Shape::kWarpColumns; c += 32) {
          if (column + c >= n) break;
          StoreAs(output.dtype, output.data, at + int64_t{k} * n + c, buffer[k * Shape::kWarpColumns + c]);
        }
      }
    }
    __syncwarp();  // The buffer is free.
  }

 private:
  __device__ int64_t Place(int first) const { return (member * n + row + first) * n + column; }
  // body(place in the buffer, place from the first row's on) of the lane's quads in the matrix.
  template <int kTogether, class Body>
  __device__ void ForQuads(int rows, Body body) const {
#pragma unroll kTogether
    for (int k = 0; k < rows; ++k) {
#pragma unroll
      for (int h = 0; h < Shape::kQuads; ++h) {
        const int c = 4 * lane + 128 * h;
        if (column + c < n) body(k * Shape::kWarpColumns + c, int64_t{k} * n + c);
      }
    }
  }
  // Types of 2 bytes an element: it is there at once.
  template <class T>
  __device__ void FetchShort(const T* data, int64_t at, int rows, float* buffer, DType dtype) const {
    const T* const from = data + at;
    if (Quads()) {
      return ForQuads<4>(rows, [&](int in, int64_t out) {
        const uint2 raw = __ldcs(reinterpret_cast<const uint2*>(from + out));
        float x[8];
        Unpack(dtype, make_uint4(raw.x, raw.y, 0, 0), x);
        *reinterpret_cast<float4*>(buffer + in) = make_float4(x[0], x[1], x[2], x[3]);
      });
    }
#pragma unroll 2
    for (int k = 0; k < rows; ++k) {
#pragma unroll
      for (int e = 0; e < Shape::C; ++e) {
        const int c = lane + 32 * e;
        if (column + c < n) buffer[k * Shape::kWarpColumns + c] = static_cast<float>(from[int64_t{k} * n + c]);
      }
    }
  }
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_ROWS_CUH_
