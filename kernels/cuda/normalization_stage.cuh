// The tensors' way into tiles and out: through a buffer in shared memory, a warp's own. Global memory sees whole lines
// whatever the type and shape, and tiles are read from it without bank conflicts.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_STAGE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_STAGE_CUH_

#include "kernels/cuda/normalization_tile.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

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

  // An entry's place among its matrix's. Rows of 64 are twisted: else lanes of a matrix met in banks.
  __device__ static constexpr int Swizzled(int entry) { return kSize == 64 ? entry ^ (entry >> 5 & 8) : entry; }
  __device__ static int At(int member, int row, int col) {
    return member * Shape::kMemberStride + Swizzled(row * kSize + col);
  }

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
    const uint32_t to = SharedAddress(buffer);
    ForVectors<4>(lane, count, [&](int, int vector, int at) { FetchAsync16(to + 4 * at, from + vector); });
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
    const uint32_t to = SharedAddress(buffer);
#pragma unroll 4
    for (int row = lane / kSize; row < rows; row += kRowsAtOnce) {
      const int member = by_member.Quotient(row), at = At(member, row - member * n, col);
      if (col < m) {
        FetchAsync4(to + 4 * at, from + row * m);
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
    switch (output.dtype) {
      case DType::kFloat32:
        return StoreRows(lane, static_cast<float*>(output.data), n, m, first, count, buffer, [](float x) { return x; });
      case DType::kFloat64:
        return StoreRows(lane, static_cast<double*>(output.data), n, m, first, count, buffer,
                         [](float x) { return static_cast<double>(x); });
      case DType::kFloat16:
        return StoreRows(lane, static_cast<__half*>(output.data), n, m, first, count, buffer,
                         [](float x) { return ToHalf(x); });
      case DType::kBFloat16:
        return StoreRows(lane, static_cast<__nv_bfloat16*>(output.data), n, m, first, count, buffer,
                         [](float x) { return ToBFloat16(x); });
    }
  }
  template <class T, class Convert>
  __device__ static void StoreRows(int lane, T* data, int n, int m, int64_t first, int count, const float* buffer,
                                   Convert convert) {
    const Divider by_member(n);
    const int col = lane % kSize, rows = count * n;
    if (col >= m) return;
    T* const to = data + first * n * m + col;
#pragma unroll 4
    for (int row = lane / kSize; row < rows; row += kRowsAtOnce) {
      const int member = by_member.Quotient(row);
      to[row * m] = convert(buffer[At(member, row - member * n, col)]);
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
    const int own = Opaque(Swizzled(place.OwnRow(0) * row_step + place.OwnCol(0) * col_step));
    const int base = place.member * Shape::kMemberStride;
#pragma unroll
    for (int r = 0; r < Shape::R; ++r) {
#pragma unroll
      for (int c = 0; c < Shape::C; ++c) {
        // The bits of r and c are twisted, each in its place.
        body(r, c, base + (own ^ Swizzled(transposed ? r + c * kSize : r * kSize + c)));
      }
    }
  }
  // Not transposed, kTogether columns at a time.
  template <int kTogether, class Body>
  __device__ static void ForRuns(const Place<Shape>& place, Body body) {
    const int own = Opaque(At(0, place.OwnRow(0), place.OwnCol(0))), base = place.member * Shape::kMemberStride;
#pragma unroll
    for (int r = 0; r < Shape::R; ++r) {
#pragma unroll
      for (int c = 0; c < Shape::C; c += kTogether) body(r, c, base + (own ^ Swizzled(r * kSize + c)));
    }
  }
  // Entries that lie side by side in every lane.
  static constexpr int kVector = Shape::kOwn;
  __device__ static void Read(const Place<Shape>& place, bool transposed, const float* buffer,
                              float (&tile)[Shape::R][Shape::C]) {
    if constexpr (kVector > 1) {
      if (!transposed) {
        return ForRuns<kVector>(place, [&](int r, int c, int at) { ReadVector(buffer + at, &tile[r][c]); });
      }
    }
    ForTile(place, transposed, [&](int r, int c, int at) { tile[r][c] = buffer[at]; });
  }
  __device__ static void Write(const Place<Shape>& place, bool transposed, const float (&tile)[Shape::R][Shape::C],
                               float* buffer) {
    WriteEach(place, transposed, buffer, [&](int r, int c) { return tile[r][c]; });
  }
  // entry(r, c) is what is written.
  template <class Entry>
  __device__ static void WriteEach(const Place<Shape>& place, bool transposed, float* buffer, Entry entry) {
    if constexpr (kVector > 1) {
      if (!transposed) {
        return ForRuns<kVector>(place, [&](int r, int c, int at) {
          float x[kVector];
#pragma unroll
          for (int k = 0; k < kVector; ++k) x[k] = entry(r, c + k);
          WriteVector(x, buffer + at);
        });
      }
    }
    ForTile(place, transposed, [&](int r, int c, int at) { buffer[at] = entry(r, c); });
  }
  // body(r, c, entry). Not transposed.
  template <class Body>
  __device__ static void Visit(const Place<Shape>& place, const float* buffer, Body body) {
    ForRuns<kVector>(place, [&](int r, int c, int at) {
      float x[kVector];
      ReadVector(buffer + at, x);
#pragma unroll
      for (int k = 0; k < kVector; ++k) body(r, c + k, x[k]);
    });
  }
  // What it returns takes the entry's place.
  template <class Body>
  __device__ static void Revise(const Place<Shape>& place, float* buffer, Body body) {
    ForRuns<kVector>(place, [&](int r, int c, int at) {
      float x[kVector];
      ReadVector(buffer + at, x);
#pragma unroll
      for (int k = 0; k < kVector; ++k) x[k] = body(r, c + k, x[k]);
      WriteVector(x, buffer + at);
    });
  }

 private:
  __device__ static void ReadVector(const float* from, float* x) {
    if constexpr (kVector == 4) {
      const float4 y = *reinterpret_cast<const float4*>(from);
      x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    } else if constexpr (kVector == 2) {
      const float2 y = *reinterpret_cast<const float2*>(from);
      x[0] = y.x, x[1] = y.y;
    } else {
      x[0] = *from;
    }
  }
  __device__ static void WriteVector(const float* x, float* to) {
    if constexpr (kVector == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    } else if constexpr (kVector == 2) {
      *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
    } else {
      *to = x[0];
    }
  }
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_STAGE_CUH_
