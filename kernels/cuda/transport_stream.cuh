// Numbers that lie in memory, costs or exponents, as the sweep over their rows (transport_stream.cu) and the kernels of
// their columns (transport_stream_end.cu) see them.
//
// Terms keep densities 2^(z + row term + column term) near the plan's: of row i (phi_i - base_i + r) s, of column j
// (phi_j - base_j - r) s + log2 b_j. base: the frame of exponents that are kept, for costs 0; r: the first column's
// initial potential, since potentials may share a large constant; for exponents, whose frame has it, 0.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_CUH_

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {

// A density, where those lie in memory in the place of exponents (KeepsDensities): half of a DensityPair.
struct Density {
  uint16_t code;
};

#if SINKHORN_HOPPER

// Densities below 2^-126 are nothing. Rows whose sums are within 2^40 of 1 are weighted by so much of their mass at
// most, so a column lacks 2^-86 of all rows' mass: one whose sum is not less than 2^-60 of it has all its digits.
constexpr float kMostWeight = 0x1p+40f, kLeastShare = 0x1p-60f;

// Two densities side by side, of 8 digits each, as bfloat16; of the second the float's other bits are what the first
// leaves there.
struct DensityPair {
  __device__ static uint32_t Pack(float t0, float t1) {
    const uint32_t first = Round(__float_as_uint(t0)) >> 16, second = __float_as_uint(t1);
    return first | (Round(second > first ? second - first : 0) & 0xffff0000u);
  }
  __device__ static void Unpack(uint32_t pair, float (&t)[2]) {
    t[0] = __uint_as_float(pair << 16), t[1] = __uint_as_float(pair);
  }
  // Two pairs.
  __device__ static void Unpack(const uint2& pairs, float (&t)[4]) {
    float low[2], high[2];
    Unpack(pairs.x, low);
    Unpack(pairs.y, high);
    t[0] = low[0], t[1] = low[1], t[2] = high[0], t[3] = high[1];
  }

 private:
  __device__ static uint32_t Round(uint32_t bits) { return bits + 0x8000u; }
};

struct StreamFrame {
  double reference, scale;
  __device__ double RowTerm(double phi, double base) const { return (phi - base + reference) * scale; }
  // As it is kept in Layout::stream_terms, which every block reads.
  __device__ float ColumnTerm(double phi, double base, double log_mass) const {
    return static_cast<float>((phi - base - reference) * scale + log_mass);
  }
};
// Whether numbers are costs, as they were given or copied. What it says of members that are not swept is memory that is
// there.
__device__ inline bool AreCosts(const Member& member) {
  const Job& job = member.job;
  return job.dense && job.streamed && (!job.framed || member.state(0)->mode == kFloat);
}
// Costs become exponents by a float, which potentials go by as well: or else all costs were off by a part of
// themselves.
__device__ inline StreamFrame StreamFrameOf(const Member& member, const EngineState& state) {
  const double scale = kLog2E / state.epsilon;
  return {*member.At<double>(member.job.at.stream_reference),
          AreCosts(member) ? static_cast<double>(static_cast<float>(scale)) : scale};
}
__device__ inline double BaseOf(const Member& member, int engine, int side, int i) {
  return AreCosts(member) ? 0 : member.At<double>(member.job.at.frame[engine][side])[i];
}
template <typename T>
__device__ inline const T* NumbersOf(const Member& member, int engine) {
  const Job& job = member.job;
  if (!AreCosts(member) || CopiesCosts(job)) return member.At<T>(job.at.exponents[engine]);
  const int64_t first = job.in.cost.shared ? 0 : member.index * job.size[0] * job.size[1];
  return static_cast<const T*>(job.in.cost.data) + first;
}

// The term of column j, or of one behind the last, at its present potential: where sweeps read it.
__device__ inline void StoreTerm(const Member& member, int engine, const EngineState& state, int j) {
  const int measure = MeasureOf(engine, 1);
  float term = static_cast<float>(kVoid);
  if (j < member.job.size[measure]) {
    const double phi = member.phi(engine, state.parity, 1)[j];
    term = StreamFrameOf(member, state).ColumnTerm(phi, BaseOf(member, engine, 1, j), member.log_mass(measure)[j]);
  }
  member.At<float>(member.job.at.stream_terms[engine])[j] = term;
}

// Whether it shows before the kernel before has ended that a pass has nothing to do for an engine of several: what has
// stopped, or is measured, stays so. Past the first cache, where other parts of the state would be seen as they are
// now. All threads of a block call it.
__device__ inline bool IsIdleAlready(const Member& member, int engine, Pass pass) {
  if (member.job.engines == 1) return false;
  __shared__ bool idle;
  const EngineState* state = member.state(engine);
  if (threadIdx.x == 0) {
    idle =
        pass == Pass::kIterate ? __ldcg(&state->stopped) != 0 : pass == Pass::kMeasure && __ldcg(&state->measured) > 0;
  }
  __syncthreads();
  return idle;
}

// One of them.
__device__ inline float LoadNumber(const float* at) { return __ldg(at); }
__device__ inline float LoadNumber(const __half* at) { return __half2float(__ldg(at)); }
__device__ inline float LoadNumber(const Density* at) {
  const bool second = reinterpret_cast<uintptr_t>(at) % sizeof(uint32_t) != 0;
  float pair[2];
  DensityPair::Unpack(__ldg(reinterpret_cast<const uint32_t*>(at - second)), pair);
  return log2f(second ? pair[1] : pair[0]);
}

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_CUH_
