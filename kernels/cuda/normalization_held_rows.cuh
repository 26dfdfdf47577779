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
    if (Quads()) {
      return ForQuads<4>(rows, [&](int k, int h) {
        const int c = 4 * lane + 128 * h;
        CopyAsync16(buffer + k * Shape::kWarpColumns + c, from + int64_t{k} * n + c);
      });
    }
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
  // Row k alone, of float32, where Quads().
  __device__ void FetchRow(const Tensor& tensor, int k, float* buffer) const {
    if (row + k >= n) return;
    const float* const from = static_cast<const float*>(tensor.data) + Place(k) + 4 * lane;
#pragma unroll
    for (int h = 0; h < Shape::kQuads; ++h) {
      if (Has(h)) FetchAsync16(SharedAddress(buffer + 4 * lane + 128 * h), from + 128 * h);
    }
  }
  __device__ static void Arrived() {
    WaitForFetches();
    __syncwarp();  // The rows are there.
  }
  // Whether the lane's quad h is inside, where Quads().
  __device__ bool Has(int h) const { return column + 4 * lane + 128 * h < n; }
  // Where the lane's numbers of rows go, straight from registers; where Quads().
  struct Sink {
    DType dtype;
    char* first;  // The lane's first element of the first row.
    int rows;     // That there are.
  };
  // Rows from number `first` on.
  __device__ Sink To(const Output& output, int first) const {
    const int bytes = output.dtype == DType::kFloat32 ? 4 : 2;
    return {output.dtype, static_cast<char*>(output.data) + (Place(first) + 4 * lane) * bytes, n - row - first};
  }
  // The lane's numbers of kCount rows: quad_of(row, quad of it).
  template <int kCount, class QuadOf>
  __device__ void PutRows(const Sink& sink, QuadOf quad_of) const {
    if (sink.dtype == DType::kFloat32) return PutRowsAs<true, kCount>(sink, quad_of);
    PutRowsAs<false, kCount>(sink, quad_of);
  }
  // The same, where the type is known to be float32 or not.
  template <bool kFloats, int kCount, class QuadOf>
  __device__ void PutRowsAs(const Sink& sink, QuadOf quad_of) const {
#pragma unroll
    for (int h = 0; h < Shape::kQuads; ++h) {
      const int there = Has(h) ? sink.rows : 0;
      char* to = sink.first + 128 * h * (kFloats ? 4 : 2);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const float4 x = quad_of(k, h);
        if (k < there) Put<kFloats>(sink.dtype, to, x);
        to += n * (kFloats ? 4 : 2);
      }
    }
  }
  // From the buffer, which is free afterwards.
  __device__ void Store(const Output& output, int first, int count, const float* buffer) const {
    __syncwarp();  // The rows are there.
    const int rows = min(count, n - row - first);
    if (Quads()) {
      const Sink sink = To(output, first);
      if (sink.dtype == DType::kFloat32) return PutBuffer<true>(sink, rows, buffer);
      return PutBuffer<false>(sink, rows, buffer);
    }
    const int64_t at = Place(first);
#pragma unroll 1
    for (int k = 0; k < rows; ++k) {
#pragma unroll 2
      for (int c = lane; c < Shape::kWarpColumns; c += 32) {
        if (column + c >= n) break;
        StoreAs(output.dtype, output.data, at + int64_t{k} * n + c, buffer[k * Shape::kWarpColumns + c]);
      }
    }
    __syncwarp();  // The buffer is free.
  }

 private:
  template <bool kFloats>
  __device__ static void Put(DType dtype, char* to, float4 x) {
    if constexpr (kFloats) {
      __stcs(reinterpret_cast<float4*>(to), x);
    } else {
      const float both[8] = {x.x, x.y, x.z, x.w};
      const uint4 packed = Pack(dtype, both);
      __stcs(reinterpret_cast<uint2*>(to), make_uint2(packed.x, packed.y));
    }
  }
  // The type and the place are looked up once, not for each quad.
  template <bool kFloats>
  __device__ void PutBuffer(const Sink& sink, int rows, const float* buffer) const {
    ForQuads<4>(rows, [&](int k, int h) {
      const float* const from = buffer + k * Shape::kWarpColumns + 4 * lane + 128 * h;
      Put<kFloats>(sink.dtype, sink.first + (int64_t{k} * n + 128 * h) * (kFloats ? 4 : 2),
                   *reinterpret_cast<const float4*>(from));
    });
    __syncwarp();  // The buffer is free.
  }
  __device__ int64_t Place(int first) const { return (member * n + row + first) * n + column; }
  // body(row, quad of it) of the lane's quads in the matrix.
  template <int kTogether, class Body>
  __device__ void ForQuads(int rows, Body body) const {
#pragma unroll kTogether
    for (int k = 0; k < rows; ++k) {
#pragma unroll
      for (int h = 0; h < Shape::kQuads; ++h) {
        const int c = 4 * lane + 128 * h;
        if (column + c < n) body(k, h);
      }
    }
  }
  // Types of 2 bytes an element: it is there at once.
  template <class T>
  __device__ void FetchShort(const T* data, int64_t at, int rows, float* buffer, DType dtype) const {
    const T* const from = data + at;
    if (Quads()) {
      return ForQuads<4>(rows, [&](int k, int h) {
        const int c = 4 * lane + 128 * h;
        const uint2 raw = __ldcs(reinterpret_cast<const uint2*>(from + int64_t{k} * n + c));
        float x[8];
        Unpack(dtype, make_uint4(raw.x, raw.y, 0, 0), x);
        *reinterpret_cast<float4*>(buffer + k * Shape::kWarpColumns + c) = make_float4(x[0], x[1], x[2], x[3]);
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
