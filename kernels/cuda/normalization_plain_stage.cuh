// The plain kernel's way in and out: whole tiles by 16 bytes, smaller matrices by rows.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_STAGE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_STAGE_CUH_

#include "kernels/cuda/normalization_plain_packed.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// A warp's members [first, first + count) of a tensor and its buffer. What is not there of a tile is left as it is.
// kCopies: as PackedStage has it.
template <class Shape, bool kShort, bool kPadded, bool kCopies, int kLeast>
struct PlainStage {
  using Any = Stage<Shape>;
  static constexpr int kArea = Shape::kSize * Shape::kSize;
  static constexpr int kPer = kShort ? 8 : 4;  // Elements of 16 bytes.
  static constexpr int kVectors = Shape::kMembers * kArea / (32 * kPer);
  static constexpr bool kPads = kPadded;
  static constexpr bool kPacked = kPadded && Shape::kSize <= 32;
  using Packed = PackedStage<Shape, kShort, kCopies, kLeast>;
  static constexpr int kBufferFloats = kPacked ? Packed::kBufferFloats : Shape::kBufferFloats;
  static constexpr bool kWide = Shape::kSize > 32;  // A row is more than a warp has lanes; a member, n > 32, a warp's.

  // Where the lane's vector number 0 of whole matrices lies, and from there number k.
  __device__ static int FirstVector(int lane) { return Held(Any::template Spread<kPer>(kPer * lane)); }
  __device__ static int Vector(int own, int k) {
    const int step = 32 * kPer * k;
    return (own ^ (Any::Swizzled(step) ^ step)) + Any::template Spread<kPer>(step);
  }
  // In a register, not computed anew for each vector; kWide has none for it.
  template <class T>
  __device__ static T Held(T x) {
    if constexpr (kWide) return x;
    return Opaque(x);
  }
  // body(entry of the n x n, place in the buffer)
  template <class Body>
  __device__ static void ForEntries(int lane, int n, Body body) {
#pragma unroll 2
    for (int row = 0; row < n; ++row) {
      body(row * n + lane, Any::At(0, row, lane));
      if (lane + 32 < n) body(row * n + lane + 32, Any::At(0, row, lane + 32));
    }
  }
  // 0 around the n x n.
  __device__ static void ClearBorder(int lane, int n, float* buffer) {
#pragma unroll 1
    for (int at = lane; at < kArea; at += 32) {
      if (at / Shape::kSize >= n || at % Shape::kSize >= n) buffer[Any::Swizzled(at)] = 0;
    }
    __syncwarp();  // The border is there.
  }
  // Whether a matrix is a whole tile, whose vectors of 16 bytes may be moved.
  __device__ static bool Whole(int n) { return !kPadded || (kWide && n == Shape::kSize); }

  // Before all else, and before a barrier of the block.
  __device__ static void Begin() {
    if constexpr (kPacked) Packed::Begin();
  }
  // Waits until what the warp stores has left its buffers, if it is still copied: before anything is written to them or
  // fetched, and before the warp ends.
  __device__ static void Free() {
    if constexpr (kPacked) Packed::Free();
  }
  // float32, on its way while the caller goes on: until Arrived. Shorter types are loaded there. `before()` is called
  // when all that remains to be done is to copy.
  template <class Before>
  __device__ static void Fetch(int lane, const Tensor& tensor, int n, int64_t first, int count, float* buffer,
                               Before before) {
    if constexpr (kPacked || kShort || kWide) before();
    if constexpr (kPacked) return Packed(lane, n, first, count).Fetch(tensor, buffer);
    if constexpr (kShort) return;
    const uint32_t to = SharedAddress(buffer);
    if (Whole(n)) {
      const float4* const from = Held(static_cast<const float4*>(tensor.data) + first * (kArea / 4) + lane);
      const int limit = count * (kArea / 4) - lane, own = FirstVector(lane);
      if constexpr (!kWide) before();
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (32 * k < limit) {
          FetchAsync16(to + 4 * Vector(own, k), from + 32 * k);
        }
      }
    } else {
      const float* const from = static_cast<const float*>(tensor.data) + first * n * n;
      ForEntries(lane, n, [&](int entry, int at) { FetchAsync4(to + 4 * at, from + entry); });
    }
  }
  __device__ static void Arrived(int lane, const Tensor& tensor, int n, int64_t first, int count, float* buffer) {
    if constexpr (kPacked) return Packed(lane, n, first, count).Arrived(tensor, buffer);
    if constexpr (!kShort) {
      WaitForFetches();
    } else if (Whole(n)) {
      const uint4* const from = Held(static_cast<const uint4*>(tensor.data) + first * (kArea / 8) + lane);
      const int limit = count * (kArea / 8) - lane, own = FirstVector(lane);
      constexpr int kTogether = kVectors < 8 ? kVectors : kWide ? 4 : 8;
#pragma unroll 1
      for (int begin = 0; begin < kVectors; begin += kTogether) {
        uint4 raw[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          raw[k] = 32 * (begin + k) < limit ? __ldcs(from + 32 * (begin + k)) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          float x[8];
          Unpack(tensor.dtype, raw[k], x);
          float4* const at = reinterpret_cast<float4*>(buffer + Vector(own, begin + k));
          at[0] = make_float4(x[0], x[1], x[2], x[3]);
          at[1] = make_float4(x[4], x[5], x[6], x[7]);
        }
      }
    } else {
      ForEntries(lane, n, [&](int entry, int at) {
        buffer[at] = LoadAs<float>(tensor.dtype, tensor.data, first * n * n + entry);
      });
    }
    __syncwarp();  // The matrices are there.
  }
  __device__ static void Store(int lane, const Output& output, int n, int64_t first, int count, const float* buffer) {
    if constexpr (kPacked) return Packed(lane, n, first, count).Store(output, buffer);
    if (Whole(n)) {
      const int limit = count * (kArea / kPer) - lane, own = FirstVector(lane);
      float4* const to = Held(static_cast<float4*>(output.data) + first * (kArea / kPer) + lane);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (32 * k >= limit) continue;
        const float4* const at = reinterpret_cast<const float4*>(buffer + Vector(own, k));
        if constexpr (kShort) {
          const float4 a = at[0], b = at[1];
          const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
          __stcs(reinterpret_cast<uint4*>(to + 32 * k), Pack(output.dtype, x));
        } else {
          __stcs(to + 32 * k, at[0]);
        }
      }
    } else {
      ForEntries(lane, n,
                 [&](int entry, int at) { StoreAs(output.dtype, output.data, first * n * n + entry, buffer[at]); });
    }
  }

  // A whole float32 matrix that is a lane's, straight from memory.
  __device__ static void Load(const Tensor& tensor, int64_t member, float (&tile)[Shape::R][Shape::C]) {
    static_assert(Shape::kLanes == 1 && Shape::C == 4, "a row is 16 bytes");
    const float4* const from = static_cast<const float4*>(tensor.data) + member * Shape::R;
#pragma unroll
    for (int r = 0; r < Shape::R; ++r) {
      const float4 x = from[r];
      tile[r][0] = x.x, tile[r][1] = x.y, tile[r][2] = x.z, tile[r][3] = x.w;
    }
  }
  // A lane's tile. `transposed`: the kernel's rows are the matrix's columns.
  __device__ static void Read(const Place<Shape>& place, bool transposed, int lane, int n, int64_t first, int count,
                              const float* buffer, float (&tile)[Shape::R][Shape::C]) {
    if constexpr (kPacked) return Packed(lane, n, first, count).Read(transposed, buffer, tile);
    Any::Read(place, transposed, buffer, tile);
  }
  // entry(r, c) is what is written.
  template <class Entry>
  __device__ static void WriteEach(const Place<Shape>& place, bool transposed, int lane, int n, int64_t first,
                                   int count, float* buffer, Entry entry) {
    if constexpr (kPacked) return Packed(lane, n, first, count).WriteEach(transposed, buffer, entry);
    Any::WriteEach(place, transposed, buffer, entry);
  }
  // body(r, c, entry); outside the matrices of 0, of kWide what ClearBorder leaves. Not transposed.
  template <class Body>
  __device__ static void Visit(const Place<Shape>& place, int lane, int n, int64_t first, int count,
                               const float* buffer, Body body) {
    if constexpr (kPacked) return Packed(lane, n, first, count).Visit(buffer, body);
    Any::Visit(place, buffer, body);
  }
  // What it returns takes the entry's place.
  template <class Body>
  __device__ static void Revise(const Place<Shape>& place, int lane, int n, int64_t first, int count, float* buffer,
                                Body body) {
    if constexpr (kPacked) return Packed(lane, n, first, count).Revise(buffer, body);
    Any::Revise(place, buffer, body);
  }
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_STAGE_CUH_
