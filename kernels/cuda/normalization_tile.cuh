// A matrix cut into tiles of R x C entries, one per lane of a group of P x Q lanes; the tensors' way in and out.
//
// A half step is a product of each lane's tile with a vector, a sum over the lanes that share rows (or columns), and a
// division. The sum is a reduce-scatter: log2 of the group's width exchanges, each of half as many numbers as the one
// before, after which each lane owns R / Q rows (C / P columns), divides, and gives the result back the same way. Lanes
// hold their rows and columns in an order of their own, k ^ Twist, so that what a lane keeps always lies in the lower
// half of its registers: no selects.
//
// Matrices pass through a buffer in shared memory, a warp's own: global memory sees whole lines whatever the type and
// shape, and tiles are read from it without bank conflicts.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_TILE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_TILE_CUH_

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/normalization_task.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr int kWarps = 4;  // Of a block, each on its own.
constexpr int kThreads = 32 * kWarps;
constexpr unsigned kFullMask = 0xffffffffu;

template <int kTileRows, int kTileCols, int kRowGroups, int kColGroups>
struct TileShape {
  static constexpr int R = kTileRows, C = kTileCols, P = kRowGroups, Q = kColGroups;
  static constexpr int kLanes = P * Q;  // Of a matrix.
  static constexpr int kMembers = 32 / kLanes;
  static constexpr int kSize = R * P;  // Rows and columns, padding included.
  static constexpr int kOwn = R / Q;   // Rows that a lane owns; as many columns.
  // Keeps the lanes of a warp in different banks.
  static constexpr int kMemberStride = kSize * kSize + (kLanes == 1 ? 4 : kLanes == 2 ? 8 : kLanes == 8 ? 16 : 0);
  static constexpr int kBufferFloats = kMembers * kMemberStride;
  static_assert(kSize == C * Q && kOwn == C / P && kOwn >= 1, "square, and owned alike");
};

// The sizes that there are kernels for. A 4 x 4 matrix is one thread's, an 8 x 8 one is two lanes'.
using Tile4 = TileShape<4, 4, 1, 1>;
using Tile8 = TileShape<4, 8, 2, 1>;
using Tile16 = TileShape<4, 8, 4, 2>;
using Tile32 = TileShape<4, 8, 8, 4>;

// Where a lane is in its matrix.
template <class Shape>
struct Place {
  __device__ explicit Place(int lane)
      : member(lane / Shape::kLanes),
        q(lane % Shape::Q),
        p(lane % Shape::kLanes / Shape::Q),
        row_twist(q * Shape::kOwn),
        col_twist(p * Shape::kOwn) {}
  __device__ int Row(int r) const { return Shape::R * p + (r ^ row_twist); }
  __device__ int Col(int c) const { return Shape::C * q + (c ^ col_twist); }
  __device__ int OwnRow(int k) const { return Shape::R * p + row_twist + k; }
  __device__ int OwnCol(int k) const { return Shape::C * q + col_twist + k; }
  // Tells lanes of a matrix apart.
  __device__ bool first() const { return p == 0 && q == 0; }

  int member;  // Of the warp's.
  int q, p, row_twist, col_twist;
};

// ---- Sums over lanes ------------------------------------------------------------------------------------------------
struct Sum {
  template <class T>
  __device__ static T Of(T a, T b) {
    return a + b;
  }
};
struct Max {
  __device__ static float Of(float a, float b) { return fmaxf(a, b); }
};
struct Min {
  __device__ static float Of(float a, float b) { return fminf(a, b); }
};

// x[k] of N over `kGroup` lanes, kStep apart: each lane ends with the first N / kGroup.
template <class Op, int kGroup, int kStep, class T, int N>
__device__ inline void ReduceScatter(T (&x)[N]) {
#pragma unroll
  for (int mask = kGroup / 2, half = N / 2; mask >= 1; mask /= 2, half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) x[k] = Op::Of(x[k], __shfl_xor_sync(kFullMask, x[k + half], mask * kStep));
  }
}
template <int kGroup, int kStep, class T, int N>
__device__ inline void AllGather(T (&x)[N]) {
#pragma unroll
  for (int mask = 1, half = N / kGroup; mask < kGroup; mask *= 2, half *= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) x[k + half] = __shfl_xor_sync(kFullMask, x[k], mask * kStep);
  }
}
template <class Shape, class Op = Sum, class T>
__device__ inline void ScatterRows(T (&x)[Shape::R]) {
  ReduceScatter<Op, Shape::Q, 1>(x);
}
template <class Shape, class Op = Sum, class T>
__device__ inline void ScatterCols(T (&x)[Shape::C]) {
  ReduceScatter<Op, Shape::P, Shape::Q>(x);
}
template <class Shape, class T>
__device__ inline void GatherRows(T (&x)[Shape::R]) {
  AllGather<Shape::Q, 1>(x);
}
template <class Shape, class T>
__device__ inline void GatherCols(T (&x)[Shape::C]) {
  AllGather<Shape::P, Shape::Q>(x);
}
// Over all lanes of a matrix.
template <class Shape, class Op, class T>
__device__ inline T OverMatrix(T x) {
#pragma unroll
  for (int mask = Shape::kLanes / 2; mask >= 1; mask /= 2) x = Op::Of(x, __shfl_xor_sync(kFullMask, x, mask));
  return x;
}

// ---- Products of a tile ---------------------------------------------------------------------------------------------
template <int R, int C, class T>
__device__ inline void TimesRows(const T (&K)[R][C], const T (&v)[C], T (&s)[R]) {
#pragma unroll
  for (int r = 0; r < R; ++r) s[r] = K[r][0] * v[0];
#pragma unroll
  for (int c = 1; c < C; ++c) {
#pragma unroll
    for (int r = 0; r < R; ++r) s[r] = fma(K[r][c], v[c], s[r]);
  }
}
template <int R, int C, class T>
__device__ inline void TimesCols(const T (&K)[R][C], const T (&u)[R], T (&q)[C]) {
#pragma unroll
  for (int c = 0; c < C; ++c) q[c] = K[0][c] * u[0];
#pragma unroll
  for (int r = 1; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) q[c] = fma(K[r][c], u[r], q[c]);
  }
}

__device__ inline float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// e^x, x <= 0 or so.
__device__ inline float Exp(float x) { return Exp2(x * 1.4426950408889634f); }

// 1 / x of the first N numbers; two at a time through one reciprocal of their product: special functions are the scarce
// unit. Products must not leave the range of float32.
template <int N>
__device__ inline void Reciprocals(const float* x, float* y) {
  if constexpr (N == 1) {
    y[0] = Reciprocal(x[0]);
  } else {
#pragma unroll
    for (int k = 0; k < N; k += 2) {
      const float a = x[k], b = x[k + 1], inverse = Reciprocal(a * b);
      y[k] = inverse * b;
      y[k + 1] = inverse * a;
    }
  }
}

// ---- The buffer -----------------------------------------------------------------------------------------------------
// i / d and i % d for i < 2^16, d <= 2^10.
struct Divider {
  __device__ explicit Divider(uint32_t d) : divisor(d), magic(d == 1 ? 0 : 0xffffffffu / d + 1) {}
  __device__ uint32_t Quotient(uint32_t i) const { return divisor == 1 ? i : __umulhi(i, magic); }
  const uint32_t divisor, magic;
};

// Eight or four elements as float32 from 16 aligned bytes.
__device__ inline void Unpack(DType dtype, const uint4& raw, float* out) {
  const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (dtype == DType::kBFloat16) {
      out[2 * k] = __uint_as_float(words[k] << 16);
      out[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
    } else {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[k]));
      out[2 * k] = pair.x;
      out[2 * k + 1] = pair.y;
    }
  }
}
__device__ inline uint4 Pack(DType dtype, const float* x) {
  uint32_t words[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (dtype == DType::kBFloat16) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * k], x[2 * k + 1]);
      words[k] = *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __half2 pair = __floats2half2_rn(x[2 * k], x[2 * k + 1]);
      words[k] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A warp's members [first, first + count) of a tensor of n x m matrices, to and from its buffer.
template <class Shape>
struct Stage {
  static constexpr int kSize = Shape::kSize, kArea = kSize * kSize;

  __device__ static int At(int member, int row, int col) { return member * Shape::kMemberStride + row * kSize + col; }

  // ---- Whole matrices of the shape's own size, packed: 16 bytes at a time -------------------------------------------
  // Where vector number lane + 32 k of `kPer` elements goes: the lane's part and the number's do not mix.
  template <int kPer>
  __device__ static constexpr int Spread(int element) {
    return element / kArea * Shape::kMemberStride + element % kArea;
  }
  // body(vector, place in the buffer). All of them, or, of fewer members, up to the last (which is repeated).
  template <int kPer, class Body>
  __device__ static void ForVectors(int lane, int count, Body body) {
    constexpr int kPerLane = Shape::kMembers * kArea / (32 * kPer);
    if (count == Shape::kMembers) {
      const int own = Spread<kPer>(kPer * lane);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) body(k, lane + 32 * k, own + Spread<kPer>(32 * kPer * k));
    } else {
      const int last = count * (kArea / kPer) - 1;
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        const int vector = min(lane + 32 * k, last);
        body(k, vector, Spread<kPer>(kPer * vector));
      }
    }
  }

  template <bool kMaybeFloat = true, bool kMaybeShort = true>
  __device__ static void LoadWhole(int lane, const Tensor& tensor, int64_t first, int count, float* buffer) {
    if (!kMaybeShort || (kMaybeFloat && tensor.dtype == DType::kFloat32)) {
      const float4* from = static_cast<const float4*>(tensor.data) + first * (kArea / 4);
      float4 x[Shape::kMembers * kArea / 128];  // All on their way before the first is used.
      ForVectors<4>(lane, count, [&](int k, int vector, int) { x[k] = __ldcs(from + vector); });
      ForVectors<4>(lane, count, [&](int k, int, int at) { *reinterpret_cast<float4*>(buffer + at) = x[k]; });
      return;
    }
    if constexpr (!kMaybeShort) return;
    const uint4* from = static_cast<const uint4*>(tensor.data) + first * (kArea / 8);
    uint4 raw[Shape::kMembers * kArea / 256];
    ForVectors<8>(lane, count, [&](int k, int vector, int) { raw[k] = __ldcs(from + vector); });
    ForVectors<8>(lane, count, [&](int k, int, int at) {
      float x[8];
      Unpack(tensor.dtype, raw[k], x);
      *reinterpret_cast<float4*>(buffer + at) = make_float4(x[0], x[1], x[2], x[3]);
      *reinterpret_cast<float4*>(buffer + at + 4) = make_float4(x[4], x[5], x[6], x[7]);
    });
  }
  // The same of float32, on its way while the caller goes on: until Arrived. Shorter types are loaded there.
  __device__ static void Fetch(int lane, const Tensor& tensor, int64_t first, int count, float* buffer) {
    const float4* from = static_cast<const float4*>(tensor.data) + first * (kArea / 4);
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(buffer));
    ForVectors<4>(lane, count, [&](int, int vector, int at) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 4 * at), "l"(from + vector) : "memory");
    });
  }
  template <bool kShort>
  __device__ static void Arrived(int lane, const Tensor& tensor, int64_t first, int count, float* buffer) {
    if constexpr (kShort) {
      LoadWhole<false, true>(lane, tensor, first, count, buffer);
    } else {
      asm volatile("cp.async.wait_all;" ::: "memory");
    }
    __syncwarp();  // The matrices are there.
  }
  template <bool kMaybeFloat = true, bool kMaybeShort = true>
  __device__ static void StoreWhole(int lane, const Output& output, int64_t first, int count, const float* buffer) {
    if (!kMaybeShort || (kMaybeFloat && output.dtype == DType::kFloat32)) {
      float4* to = static_cast<float4*>(output.data) + first * (kArea / 4);
      ForVectors<4>(lane, count, [&](int, int vector, int at) {
        __stcs(to + vector, *reinterpret_cast<const float4*>(buffer + at));
      });
      return;
    }
    if constexpr (!kMaybeShort) return;
    uint4* to = static_cast<uint4*>(output.data) + first * (kArea / 8);
    ForVectors<8>(lane, count, [&](int, int vector, int at) {
      const float4 a = *reinterpret_cast<const float4*>(buffer + at);
      const float4 b = *reinterpret_cast<const float4*>(buffer + at + 4);
      const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      __stcs(to + vector, Pack(output.dtype, x));
    });
  }
  __device__ static bool IsWhole(int n, int m, DType dtype, bool shared) {
    return n == kSize && m == kSize && dtype != DType::kFloat64 && !shared;
  }

  // ---- Other shapes and types: a row by as many lanes as the shape has columns --------------------------------------
  // body(k, row of the tensor, row in the buffer), kBatch rows at a time: k < kBatch; rows past the last repeat it.
  static constexpr int kBatch = 8, kRowsAtOnce = 32 / kSize;
  template <class Begin, class End>
  __device__ static void ForRows(int lane, int n, bool shared, int64_t first, int count, Begin load, End store) {
    const Divider by_member(n);
    const int rows = count * n, mine = lane / kSize;
#pragma unroll 1
    for (int begin = mine; begin < rows; begin += kRowsAtOnce * kBatch) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int row = min(begin + kRowsAtOnce * k, rows - 1);
        load(k, shared ? row - static_cast<int>(by_member.Quotient(row)) * n : first * n + row);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int row = min(begin + kRowsAtOnce * k, rows - 1), member = by_member.Quotient(row);
        store(k, first * n + row, At(member, row - member * n, 0));
      }
    }
  }
  template <class T>
  __device__ static void LoadRows(int lane, const T* data, bool shared, int n, int m, int64_t first, int count,
                                  float* buffer) {
    const int col = lane % kSize;
    T x[kBatch];  // On their way together.
    const T* from = data + min(col, m - 1);
    ForRows(
        lane, n, shared, first, count, [&](int k, int64_t row) { x[k] = from[row * m]; },
        [&](int k, int64_t, int at) {
          if (col < m) buffer[at + col] = static_cast<float>(x[k]);
        });
  }
  // float32 on its way, as Fetch. False: not this tensor.
  __device__ static bool FetchRows(int lane, const Tensor& tensor, int n, int m, int64_t first, int count,
                                   float* buffer) {
    if (tensor.dtype != DType::kFloat32 || tensor.shared) return false;
    if (n == kSize && m == kSize) {
      Fetch(lane, tensor, first, count, buffer);
      return true;
    }
    const Divider by_member(n);
    const int col = lane % kSize, rows = count * n;
    const float* from = static_cast<const float*>(tensor.data) + first * n * m + col;
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(buffer));
#pragma unroll 4
    for (int row = lane / kSize; row < rows; row += kRowsAtOnce) {
      const int member = by_member.Quotient(row), at = At(member, row - member * n, col);
      if (col < m) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + 4 * at), "l"(from + row * m) : "memory");
      }
    }
    return true;
  }
  __device__ static void Load(int lane, const Tensor& tensor, int n, int m, int64_t first, int count, float* buffer) {
    if (IsWhole(n, m, tensor.dtype, tensor.shared)) {
      LoadWhole(lane, tensor, first, count, buffer);
    } else if (tensor.dtype == DType::kFloat32) {
      LoadRows(lane, static_cast<const float*>(tensor.data), tensor.shared, n, m, first, count, buffer);
    } else if (tensor.dtype == DType::kBFloat16) {
      LoadRows(lane, static_cast<const __nv_bfloat16*>(tensor.data), tensor.shared, n, m, first, count, buffer);
    } else {
      const Divider by_member(n);
      const int col = lane % kSize, rows = count * n;
#pragma unroll 1
      for (int row = lane / kSize; row < rows; row += kRowsAtOnce) {
        const int member = by_member.Quotient(row), i = row - member * n;
        if (col >= m) continue;
        const int64_t from = (tensor.shared ? i : first * n + row) * m + col;
        buffer[At(member, i, col)] = LoadAs<float>(tensor.dtype, tensor.data, from);
      }
    }
  }
  __device__ static void Store(int lane, const Output& output, int n, int m, int64_t first, int count,
                               const float* buffer) {
    if (IsWhole(n, m, output.dtype, false)) return StoreWhole(lane, output, first, count, buffer);
    const Divider by_member(n);
    const int col = lane % kSize, rows = count * n;
    if (col >= m) return;
#pragma unroll 1
    for (int row = lane / kSize; row < rows; row += kRowsAtOnce) {
      const int member = by_member.Quotient(row);
      StoreAs(output.dtype, output.data, (first * n + row) * m + col, buffer[At(member, row - member * n, col)]);
    }
  }
  // What the lanes own of a vector of each member, by way of the buffer.
  __device__ static void StoreOwned(int lane, const Output& output, int size, int64_t first, int count, int member,
                                    int own, const float* x, float* buffer) {
#pragma unroll
    for (int k = 0; k < Shape::kOwn; ++k) buffer[member * kSize + own + k] = x[k];
    __syncwarp();  // The vectors are there.
#pragma unroll 1
    for (int k = lane; k < count * size; k += 32) {
      StoreAs(output.dtype, output.data, first * size + k, buffer[k / size * kSize + k % size]);
    }
    __syncwarp();  // The buffer is free.
  }
  // The dustbin's row and column of P's n x m.
  __device__ static void FillBorder(int lane, const Tensor& score, int n, int m, int64_t first, int count,
                                    float* buffer) {
    const int border = n + m - 1;
#pragma unroll 1
    for (int k = lane; k < count * border; k += 32) {
      const int member = k / border, e = k % border;
      const float value = LoadAs<float>(score.dtype, score.data, score.shared ? 0 : first + member);
      buffer[e < m ? At(member, n - 1, e) : At(member, e - m, m - 1)] = value;
    }
  }

  // A lane's tile. `transposed`: the kernel's rows are the buffer's columns.
  template <class Body>
  __device__ static void ForTile(const Place<Shape>& place, bool transposed, Body body) {
    const int row_step = transposed ? 1 : kSize, col_step = transposed ? kSize : 1;
    const int own = Opaque(place.OwnRow(0) * row_step + place.OwnCol(0) * col_step);
    const int base = place.member * Shape::kMemberStride;
#pragma unroll
    for (int r = 0; r < Shape::R; ++r) {
#pragma unroll
      for (int c = 0; c < Shape::C; ++c) {
        // The bits of r and c are twisted, each in its place.
        body(r, c, base + (own ^ (transposed ? r + c * kSize : r * kSize + c)));
      }
    }
  }
  // Computed where it is used: kept from being computed once for all, into a register for each entry.
  __device__ static int Opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
  }
  // Entries that lie side by side in every lane.
  static constexpr int kVector = Shape::kOwn;
  __device__ static void Read(const Place<Shape>& place, bool transposed, const float* buffer,
                              float (&tile)[Shape::R][Shape::C]) {
    if constexpr (kVector > 1) {
      if (!transposed) {
        const int own = Opaque(At(0, place.OwnRow(0), place.OwnCol(0)));
        const int base = place.member * Shape::kMemberStride;
#pragma unroll
        for (int r = 0; r < Shape::R; ++r) {
#pragma unroll
          for (int c = 0; c < Shape::C; c += kVector) {
            ReadVector(buffer + base + (own ^ (r * kSize + c)), &tile[r][c]);
          }
        }
        return;
      }
    }
    ForTile(place, transposed, [&](int r, int c, int at) { tile[r][c] = buffer[at]; });
  }
  __device__ static void Write(const Place<Shape>& place, bool transposed, const float (&tile)[Shape::R][Shape::C],
                               float* buffer) {
    if constexpr (kVector > 1) {
      if (!transposed) {
        const int own = Opaque(At(0, place.OwnRow(0), place.OwnCol(0)));
        const int base = place.member * Shape::kMemberStride;
#pragma unroll
        for (int r = 0; r < Shape::R; ++r) {
#pragma unroll
          for (int c = 0; c < Shape::C; c += kVector) {
            WriteVector(&tile[r][c], buffer + base + (own ^ (r * kSize + c)));
          }
        }
        return;
      }
    }
    ForTile(place, transposed, [&](int r, int c, int at) { buffer[at] = tile[r][c]; });
  }

 private:
  __device__ static void ReadVector(const float* from, float* x) {
    if constexpr (kVector == 4) {
      const float4 y = *reinterpret_cast<const float4*>(from);
      x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    } else {
      const float2 y = *reinterpret_cast<const float2*>(from);
      x[0] = y.x, x[1] = y.y;
    }
  }
  __device__ static void WriteVector(const float* x, float* to) {
    if constexpr (kVector == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
    }
  }
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_TILE_CUH_
