// The plain kernel's way in and out for matrices up to a tile's size: in the buffer they lie as in memory, one behind
// the other, so that 16 bytes (of shorter types 8) are moved at a time whatever the side, or all by one copy.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_PACKED_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_PACKED_CUH_

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/normalization_stage.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// A warp's members [first, first + count) of a tensor of n x n matrices, n >= kLeast, and its buffer. kCopies: float32
// is moved by bulk copies instead, where the device has them, one for all or one a member.
template <class Shape, bool kShort, bool kCopies, int kLeast>
class PackedStage {
 public:
  static constexpr int kQuad = 4;  // Elements moved at a time.
  static constexpr int kBufferFloats = Shape::kMembers * (Shape::kSize * Shape::kSize + kQuad) + 2 * kQuad;
  // Members whose quads may not be aligned.
  static constexpr bool kShifted = Shape::kMembers % kQuad != 0;
  static constexpr bool kBulk = SINKHORN_HOPPER && kCopies && !kShort;

  __device__ static void Begin() {
    if (kBulk && threadIdx.x % 32 == 0) {
      Incoming().parity = 0;
      InitBarrier(&Incoming().barrier, 1);
      FenceNewBarriers();
    }
  }
  __device__ static void Free() {
    if constexpr (!kBulk) return;
    AwaitStoresRead();
    FenceCopies();
    __syncwarp();
  }

  __device__ PackedStage(int lane, int n, int64_t first, int count)
      : lane_(lane), n_(n), area_(n * n), count_(count), begin_(first * area_), by_member_(area_) {
    // Even sides: between matrices lies what puts them into different banks.
    pad_ = n % 2 == 0 && area_ / kQuad % 2 == 0 ? kQuad : 0;
    shift_ = kShifted ? static_cast<int>(begin_ % kQuad) : 0;
    end_ = shift_ + count * area_;
    whole_ = end_ & ~(kQuad - 1);
  }

  // float32, on its way while the caller goes on: until Arrived. Shorter types are loaded there.
  __device__ void Fetch(const Tensor& tensor, float* buffer) const {
    if constexpr (kShort) return;
    const float* const from = static_cast<const float*>(tensor.data) + (begin_ - shift_);
    const uint32_t to = SharedAddress(buffer);
    if constexpr (kBulk) {
      if (lane_ == 0) ArriveExpecting(&Incoming().barrier, 4 * whole_);
      if (lane_ < Pieces()) CopyBulk(to + 4 * PieceAt(), from + lane_ * area_, PieceBytes(whole_), &Incoming().barrier);
    } else {
#pragma unroll 4
      for (int at = kQuad * lane_; at < whole_; at += kQuad * 32) {
        FetchAsync16(to + 4 * Placed(at), from + at);
      }
    }
    if (whole_ + lane_ < end_) {
      FetchAsync4(to + 4 * (whole_ + lane_), from + whole_ + lane_);
    }
  }
  __device__ void Arrived(const Tensor& tensor, float* buffer) const {
    if constexpr (!kShort) {
      WaitForFetches();
      if constexpr (kBulk) {
        const unsigned parity = Incoming().parity;
        WaitForPhase(&Incoming().barrier, parity);
        __syncwarp();  // All know the parity.
        if (lane_ == 0) Incoming().parity = parity ^ 1;
      }
    } else {
      const uint16_t* const from = static_cast<const uint16_t*>(tensor.data) + (begin_ - shift_);
      const auto unpack = [&](uint2 raw, float* x) { Unpack(tensor.dtype, make_uint4(raw.x, raw.y, 0, 0), x); };
#pragma unroll 4
      for (int at = kQuad * lane_; at < whole_; at += kQuad * 32) {
        float x[8];
        unpack(__ldcs(reinterpret_cast<const uint2*>(from + at)), x);
        *reinterpret_cast<float4*>(buffer + Placed(at)) = make_float4(x[0], x[1], x[2], x[3]);
      }
      if (whole_ + lane_ < end_) {
        float x[8];
        unpack(make_uint2(from[whole_ + lane_], 0), x);
        buffer[whole_ + lane_] = x[0];
      }
    }
    __syncwarp();  // The matrices are there.
  }
  __device__ void Store(const Output& output, const float* buffer) const {
    // Quads that are the members' alone; then what lies before them and behind.
    const int first = kShifted && shift_ != 0 ? kQuad : 0;
    const int64_t to = begin_ - shift_;
    if constexpr (kBulk) {
      FenceCopies();
      __syncwarp();  // The matrices are there for copies, too.
      if (lane_ < Pieces() && first < whole_) {
        StoreBulk(static_cast<float*>(output.data) + to + first + lane_ * area_,
                  SharedAddress(buffer + first) + 4 * PieceAt(), PieceBytes(whole_ - first));
      }
    } else {
#pragma unroll 4
      for (int at = first + kQuad * lane_; at < whole_; at += kQuad * 32) {
        StoreQuad(output, to + at, *reinterpret_cast<const float4*>(buffer + Placed(at)));
      }
    }
    const int behind = max(whole_, first) + lane_;
    if (behind < end_) StoreOne(output, to + behind, buffer[behind]);
    if (kShifted && shift_ + lane_ < min(first, end_)) {
      StoreOne(output, to + shift_ + lane_, buffer[shift_ + lane_]);
    }
  }

  // A lane's tile. `transposed`: the kernel's rows are the matrix's columns. Outside are copies of the member's first
  // row and column.
  __device__ void Read(bool transposed, const float* buffer, float (&tile)[Shape::R][Shape::C]) const {
    ForEach(transposed, [&](int r, int c, bool, int at) {
      tile[r][c] = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(buffer) + at);
    });
  }
  // entry(r, c) is what is written.
  template <class Entry>
  __device__ void WriteEach(bool transposed, float* buffer, Entry entry) const {
    ForEach(transposed, [&](int r, int c, bool inside, int at) {
      if (inside) *reinterpret_cast<float*>(reinterpret_cast<char*>(buffer) + at) = entry(r, c);
    });
  }
  // body(r, c, entry), 0 outside. Not transposed.
  template <class Body>
  __device__ void Visit(const float* buffer, Body body) const {
    const Place<Shape> place(Opaque(lane_));
    const float* const from = buffer + Base(place);
    int row[Shape::R];
#pragma unroll
    for (int r = 0; r < Shape::R; ++r) row[r] = place.Row(r) < n_ ? place.Row(r) * n_ : -1;
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      const int col = place.Col(c);
#pragma unroll
      for (int r = 0; r < Shape::R; ++r) body(r, c, row[r] >= 0 && col < n_ ? from[row[r] + col] : 0.0f);
    }
  }
  // What it returns takes the entry's place; 0 outside, where nothing is.
  template <class Body>
  __device__ void Revise(float* buffer, Body body) const {
    const Place<Shape> place(Opaque(lane_));
    float* const at = buffer + Base(place);
    int row[Shape::R];
#pragma unroll
    for (int r = 0; r < Shape::R; ++r) row[r] = place.Row(r) < n_ ? place.Row(r) * n_ : -1;
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      const int col = place.Col(c);
#pragma unroll
      for (int r = 0; r < Shape::R; ++r) {
        if (row[r] >= 0 && col < n_) at[row[r] + col] = body(r, c, at[row[r] + col]);
      }
    }
  }

 private:
  struct Copies {
    uint64_t barrier;
    unsigned parity;  // Of what is on its way, or comes next.
  };
  // The warp's.
  __device__ static Copies& Incoming() {
    __shared__ Copies copies[kWarps];
    return copies[threadIdx.x / 32];
  }
  // One copy of all or, where something lies between matrices, of each, by a lane each.
  __device__ int Pieces() const { return pad_ != 0 ? count_ : whole_ > 0 ? 1 : 0; }
  __device__ int PieceAt() const { return lane_ * (area_ + pad_); }
  __device__ unsigned PieceBytes(int all) const { return 4 * (pad_ != 0 ? area_ : all); }
  // Without padding the same: odd sides' quads may be of two matrices.
  __device__ int Placed(int at) const {
    if constexpr (Shape::kMembers == 1) return at;
    return at + pad_ * static_cast<int>(by_member_.Quotient(at));
  }
  __device__ static void StoreQuad(const Output& output, int64_t to, const float4& quad) {
    if constexpr (kShort) {
      const float x[8] = {quad.x, quad.y, quad.z, quad.w};
      const uint4 packed = Pack(output.dtype, x);
      __stcs(reinterpret_cast<uint2*>(static_cast<uint16_t*>(output.data) + to), make_uint2(packed.x, packed.y));
    } else {
      __stcs(reinterpret_cast<float4*>(static_cast<float*>(output.data) + to), quad);
    }
  }
  __device__ static void StoreOne(const Output& output, int64_t to, float one) {
    if constexpr (kShort) {
      const float x[8] = {one};
      static_cast<uint16_t*>(output.data)[to] = static_cast<uint16_t>(Pack(output.dtype, x).x);
    } else {
      static_cast<float*>(output.data)[to] = one;
    }
  }
  // body(r, c, inside, at) for a lane's tile. at: in bytes from the buffer; of what is outside, where its copy is.
  template <class Body>
  __device__ void ForEach(bool transposed, Body body) const {
    const Place<Shape> place(Opaque(lane_));
    if (Place<Shape>::Last(0) < kLeast && !transposed) {
      ForEach(place, 4 * n_, 4, body);  // A group's columns lie side by side: one address for those always inside.
    } else {
      ForEach(place, transposed ? 4 : 4 * n_, transposed ? 4 * n_ : 4, body);
    }
  }
  template <class Body>
  __device__ void ForEach(const Place<Shape>& place, int row_step, int col_step, Body body) const {
    constexpr int kOwn = Shape::kOwn, R = Shape::R, C = Shape::C;
    // Of lines that are always inside one address a group.
    const auto line = [&](int number, int group, int step, bool inside) {
      const bool always = Place<Shape>::Last(number) < kLeast;
      return always ? group * step + number % kOwn * step : inside ? (group + number % kOwn) * step : 0;
    };
    const auto row_inside = [&](int r) { return Place<Shape>::Last(r) < kLeast || place.Row(r) < n_; };
    const auto col_inside = [&](int c) { return Place<Shape>::Last(c) < kLeast || place.Col(c) < n_; };
    const auto row = [&](int r) {
      return 4 * Base(place) + line(r, place.Row(r / kOwn * kOwn), row_step, row_inside(r));
    };
    const auto col = [&](int c) { return line(c, place.Col(c / kOwn * kOwn), col_step, col_inside(c)); };
    if constexpr (R == C) {  // Fewer addresses are kept of columns.
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int c = 0; c < C; ++c) body(r, c, row_inside(r) && col_inside(c), row(r) + col(c));
      }
    } else {
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int r = 0; r < R; ++r) body(r, c, row_inside(r) && col_inside(c), row(r) + col(c));
      }
    }
  }
  __device__ int Base(const Place<Shape>& place) const { return shift_ + place.member * (area_ + pad_); }

  const int lane_, n_, area_, count_;
  const int64_t begin_;      // Elements.
  const Divider by_member_;  // at < 2^16
  int pad_, shift_;
  int end_, whole_;  // Of what is moved, from the quad on in which it begins: all, and what is whole quads.
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_PACKED_CUH_
