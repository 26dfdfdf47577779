// The preparation's step 3: points, their norms, masses and first potentials.
//
// Shifts of points x + c and y + e, x and y centred. What depends on one side alone goes into its own:
//   kappa |x + d - y|^2 = kappa (|x|^2 + |y|^2 + 2 <x, d> - 2 <y, d> + |d|^2) - 2 kappa <x, y>,  d = c - e;
//   -<x + c, y + e>     = -<x, e> - <y, c> - <c, e> - <x, y>.
//
// FAST rounds centred coordinates to 11 bits once, before anything is made of them, so that norms and products agree:
// its answers are exact for clouds displaced by the rounding.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_PREPARE_POINTS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_PREPARE_POINTS_CUH_

#include <type_traits>

#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_fragments.cuh"
#include "kernels/cuda/transport_prepare_sums.cuh"

namespace sinkhorn {
namespace cuda {

// To 11 significant bits, ties to even; of numbers below 2^-1022 to as many places as those of 2^-1022 have.
__device__ inline double RoundedTo11Bits(double value) {
  constexpr int kDropped = 52 - 10;
  const auto bits = static_cast<uint64_t>(__double_as_longlong(value));
  const uint64_t below_half = (uint64_t{1} << (kDropped - 1)) - 1;
  const uint64_t rounded = (bits + below_half + (bits >> kDropped & 1)) >> kDropped << kDropped;
  return __longlong_as_double(static_cast<int64_t>(rounded));
}

// Lanes that share a point: 2 to 32, side by side.
struct Lanes {
  int width, lane;

  __device__ double Sum(double value) const {
#pragma unroll 1
    for (int other = width / 2; other > 0; other /= 2) value += __shfl_xor_sync(0xffffffffu, value, other);
    return value;
  }
  // Of each.
  template <int kCount>
  __device__ void Sum(double (*x)[kCount], double (*y)[kCount]) const {
#pragma unroll 1
    for (int other = width / 2; other > 0; other /= 2) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const double more = __shfl_xor_sync(0xffffffffu, (*x)[k], other);
        (*y)[k] += __shfl_xor_sync(0xffffffffu, (*y)[k], other);
        (*x)[k] += more;
      }
    }
  }
  __device__ double Dot(const double* u, const double* v, int dim) const {
    double sum = 0;
#pragma unroll 1
    for (int k = lane; k < dim; k += width) sum += u[k] * v[k];
    return Sum(sum);
  }
};

// What every point needs of both clouds: what turns coordinates into halves (then they are at most 64, and so far above
// where halves lose bits), and the centres' squared distance.
struct Surroundings {
  double scale, apart2;
};
// From the boxes around the points, which are known before their norms; FAST rounds coordinates. Every thread gets it.
template <bool kSquares>
__device__ Surroundings SurroundingsOf(const Member& member) {
  const Job& job = member.job;
  __shared__ double parts[3][kWarps];
  const bool together = !kSquares && SourceOf(job) == Source::kDistances;
  const double* centre[2] = {member.At<double>(job.at.centre[0]), member.At<double>(job.at.centre[1])};
  const double* low[2] = {member.At<double>(job.at.chunk_sums[0]) + job.dim,
                          member.At<double>(job.at.chunk_sums[1]) + job.dim};
  double sum[3] = {};  // Squared radii of the boxes, apart2.
#pragma unroll 1
  for (int k = threadIdx.x; k < job.dim; k += kThreads) {
    const double x = centre[0][k], y = centre[1][k];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const double middle = together ? (x + y) / 2 : side == 0 ? x : y;
      const double farthest = fmax(low[side][job.dim + k] - middle, middle - low[side][k]);
      sum[side] += farthest * farthest;
    }
    sum[2] += (x - y) * (x - y);
  }
#pragma unroll
  for (double& s : sum) {
    for (int lane = 16; lane > 0; lane /= 2) s += __shfl_xor_sync(0xffffffffu, s, lane);
  }
  if (threadIdx.x % 32 < 3) {
    const int which = threadIdx.x % 32;
    parts[which][threadIdx.x / 32] = which == 0 ? sum[0] : which == 1 ? sum[1] : sum[2];
  }
  __syncthreads();
#pragma unroll
  for (int which = 0; which < 3; ++which) {
    sum[which] = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum[which] += parts[which][warp];
  }
  const double radius = sqrt(fmax(sum[0], sum[1])) * (1 + 0x1p-11);
  const bool scales = job.halves && radius > 0 && isfinite(radius);
  return {scales ? ldexp(1.0, 5 - ilogb(radius)) : 1, sum[2]};
}

// Coordinates as far as kernels read them: the halves' padding too.
__device__ inline int PaddedCoordinates(const Job& job) {
  if (!job.halves) return job.dim;
  return job.dim > kDepth ? CloudDepths(job.dim) * kDepth : CloudRowBytes(job.dim) / static_cast<int>(sizeof(__half));
}

// Step 3: points of a side, each by some lanes that take kAtOnce coordinates in turn: 4, fewer operations, or 2, fewer
// registers. Sums are in the same order. What a point needs of the job is read once for all of them. What lies behind
// the last point is padding.
template <bool kSquares, int kAtOnce>
class Centring {
 public:
  __device__ Centring(const Member& member, const TensorView& view, int side, double scale)
      : member_(member),
        side_(side),
        dim_(member.job.dim),
        count_(member.job.size[side]),
        padded_(PaddedCoordinates(member.job)),
        dtype_(view.dtype),
        side_by_side_(AreSideBySide(view, member.job.dim, kAtOnce)),
        halves_(member.job.halves),
        planes_(PlanesOf(member.job)),
        rounds_(member.job.precision == Precision::kFast),
        has_floats_(member.job.precision != Precision::kDouble),
        stores_(!member.job.lean),
        together_(!kSquares && SourceOf(member.job) == Source::kDistances),
        kappa_(member.job.in.kappa),
        scale_(scale),
        row_bytes_(CloudRowBytes(dim_)),
        in_(static_cast<const char*>(view.data)),
        first_(view.shared ? 0 : member.index * count_ * dim_),
        centre_(member.At<double>(member.job.at.centre[side])),
        theirs_(member.At<double>(member.job.at.centre[1 - side])),
        points64_(member.At<double>(member.job.at.points64[side])),
        points32_(member.At<float>(member.job.at.points32[side])),
        to_(member.At<char>(member.job.at.halves[side])),
        linear_(member.At<double>(member.job.at.linear[side])),
        norm2_(member.At<double>(member.job.at.norm2[side])) {
    int width = 8 / kAtOnce;
    while (width < 64 / kAtOnce && kAtOnce * width < padded_) width *= 2;
    lanes_ = {width, static_cast<int>(threadIdx.x) % width};
    Centres(kAtOnce * lanes_.lane, &own_, &apart_);
  }
  // Lanes that share a point.
  __device__ int width() const { return lanes_.width; }

  // Coordinates side by side.
  struct Numbers {
    double at[kAtOnce];
  };
  // The lane's first coordinates of point i, as they are.
  __device__ Numbers Read(int64_t i) const {
    const int k = kAtOnce * lanes_.lane;
    return i < count_ && k < dim_ ? Load(i, k) : Numbers{};
  }
  // Point i, whose first coordinates `value` are; its squared norm. `apart2`: the centres' squared distance.
  __device__ double Centre(int64_t i, const Numbers& value, double apart2) const {
    const bool there = i < count_;
    Sums sums = {};
    int k = kAtOnce * lanes_.lane;
    if (k < padded_) Place(i, k, value, own_, apart_, &sums);
#pragma unroll 1
    for (k += kAtOnce * lanes_.width; k < padded_; k += kAtOnce * lanes_.width) {
      Numbers own = {}, apart = {}, more = {};
      if (there && k < dim_) {
        more = Load(i, k);
        Centres(k, &own, &apart);
      }
      Place(i, k, more, own, apart, &sums);
    }
    lanes_.Sum(&sums.norm2, &sums.along);
    double norm2 = sums.norm2[0], along = sums.along[0];
    if constexpr (kAtOnce == 4) norm2 += sums.norm2[1], along += sums.along[1];
    double linear = kappa_ * (side_ == 0 ? 2 * along + apart2 : -2 * along), square = kappa_ * norm2;
    if (!kSquares) Others(i, norm2, square, &linear);
    if (there && lanes_.lane == 0) {
      linear_[i] = linear;
      norm2_[i] = together_ ? 0 : square;
    }
    return there ? norm2 : 0;
  }

 private:
  // Of a lane's pairs of coordinates: apart, so that kAtOnce changes no bit.
  struct Sums {
    double norm2[kAtOnce / 2], along[kAtOnce / 2];
  };

  __device__ Numbers Load(int64_t i, int k) const {
    const int64_t e = first_ + i * dim_ + k;
    Numbers to = {};
    if (side_by_side_) {
      float from[kAtOnce];
      if constexpr (kAtOnce == 4) {
        const float4 all = __ldg(reinterpret_cast<const float4*>(in_ + e * sizeof(float)));
        from[0] = all.x, from[1] = all.y, from[2] = all.z, from[3] = all.w;
      } else {
        const float2 both = __ldg(reinterpret_cast<const float2*>(in_ + e * sizeof(float)));
        from[0] = both.x, from[1] = both.y;
      }
#pragma unroll
      for (int q = 0; q < kAtOnce; ++q) to.at[q] = from[q];
      return to;
    }
#pragma unroll
    for (int q = 0; q < kAtOnce; ++q) {
      if (k + q < dim_) to.at[q] = LoadDouble(dtype_, in_, e + q);
    }
    return to;
  }
  // What is taken off coordinates from k on, and how far the centres are apart there; nothing behind the last.
  __device__ void Centres(int k, Numbers* own, Numbers* apart) const {
#pragma unroll
    for (int q = 0; q < kAtOnce; ++q) {
      const bool there = k + q < dim_;
      const double mine = there ? centre_[k + q] : 0, other = there ? theirs_[k + q] : 0;
      own->at[q] = together_ ? (mine + other) / 2 : mine;
      apart->at[q] = side_ == 0 ? mine - other : other - mine;
    }
  }
  // Coordinates from k on of point i: centred, stored, and added up.
  __device__ void Place(int64_t i, int k, const Numbers& value, const Numbers& own, const Numbers& apart,
                        Sums* sums) const {
    float scaled[kAtOnce];
#pragma unroll
    for (int q = 0; q < kAtOnce; q += 2) {
      const bool there = i < count_ && k + q < dim_, both = k + q + 1 < dim_;
      double x = there ? value.at[q] - own.at[q] : 0, y = there && both ? value.at[q + 1] - own.at[q + 1] : 0;
      if (rounds_ && !together_) x = RoundedTo11Bits(x), y = RoundedTo11Bits(y);
      sums->norm2[q / 2] = fma(x, x, fma(y, y, sums->norm2[q / 2]));
      sums->along[q / 2] = fma(x, apart.at[q], fma(y, apart.at[q + 1], sums->along[q / 2]));
      if (there && stores_) Store(i * dim_ + k + q, x, y, both);
      scaled[q] = static_cast<float>(x * scale_), scaled[q + 1] = static_cast<float>(y * scale_);
    }
    if (halves_) StoreHalves(i, k, scaled);
  }
  __device__ void Store(int64_t at, double x, double y, bool both) const {
    const float2 less = {static_cast<float>(x), static_cast<float>(y)};
    if (dim_ % 2 == 0) {
      *reinterpret_cast<double2*>(points64_ + at) = make_double2(x, y);
      if (has_floats_) *reinterpret_cast<float2*>(points32_ + at) = less;
      return;
    }
    points64_[at] = x;
    if (both) points64_[at + 1] = y;
    if (has_floats_) points32_[at] = less.x;
    if (has_floats_ && both) points32_[at + 1] = less.y;
  }
  // x scale = high + low + what is below 2^-22 of it; FAST has no low.
  __device__ void StoreHalves(int64_t i, int k, const float (&scaled)[kAtOnce]) const {
    const int64_t plane_bytes = int64_t{kCloudTile} * row_bytes_;
    const int place = static_cast<int>(i % kCloudTile);
    char* to = to_ + (i / kCloudTile * CloudDepths(dim_) + k / kDepth) * planes_ * plane_bytes +
               SwizzledAt(place, k % kDepth / 8, row_bytes_) + k % 8 * sizeof(__half);
    uint32_t high[kAtOnce / 2], low[kAtOnce / 2];
#pragma unroll
    for (int q = 0; q < kAtOnce; q += 2) Split(scaled[q], scaled[q + 1], &high[q / 2], &low[q / 2]);
    StoreWords(to, high);
    if (planes_ > 1) StoreWords(to + plane_bytes, low);
  }
  __device__ static void StoreWords(char* to, const uint32_t (&words)[kAtOnce / 2]) {
    if constexpr (kAtOnce == 4) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint32_t*>(to) = words[0];
    }
  }
  // Of costs that are no squared distances.
  __device__ void Others(int64_t i, double norm2, double square, double* linear) const {
    const Job& job = member_.job;
    const bool tells = i < count_ && lanes_.lane == 0;
    if (together_) *linear = 0;
    if (together_ && tells) member_.At<double>(job.at.length[side_])[i] = norm2;
    if (!IsNegativeDot(job)) return;  // Whole distances have too much:
    __syncwarp();                     // The points are there.
    const double* point = i < count_ ? points64_ + i * dim_ : centre_;
    *linear = -square - lanes_.Dot(point, theirs_, dim_) - (side_ == 0 ? lanes_.Dot(centre_, theirs_, dim_) : 0);
    if (job.engines == 1) return;
    const double self = -square - lanes_.Dot(point, centre_, dim_) - lanes_.Dot(centre_, centre_, dim_) / 2;
    if (tells) member_.At<double>(job.at.self_linear[side_])[i] = self;
  }

  const Member& member_;
  const int side_, dim_, count_, padded_;
  const DType dtype_;
  const bool side_by_side_, halves_;
  const int planes_;
  const bool rounds_, has_floats_, stores_, together_;
  const double kappa_, scale_;
  const int row_bytes_;
  const char* const in_;
  const int64_t first_;
  const double *const centre_, *const theirs_;
  double* const points64_;
  float* const points32_;
  char* const to_;
  double *const linear_, *const norm2_;
  Lanes lanes_;
  Numbers own_, apart_;  // Of this lane's first coordinates.
};

// What sweeps read before it is known whether they are to do anything: of points that engines have on a side of theirs.
// `f`: the point's initial potential.
__device__ inline void PrepareSweeps(const Member& member, int side, int i, double f) {
  const Job& job = member.job;
  if (side == 1 && i == 0) *member.At<double>(job.at.stream_reference) = job.dense || LoopsClouds(job) ? f : 0;
  for (int e = 0; e < job.engines; ++e) {
    for (int s = 0; s < 2; ++s) {
      if (MeasureOf(e, s) != side) continue;
      member.phi(e, 1, s)[i] = 0;
      if (HasFrames(job)) member.At<double>(job.at.frame[e][s])[i] = 0;
    }
  }
}

template <bool kSquares, int kAtOnce>
__device__ void PreparePoints(const Member& member, int side, int block, int points) {
  const Job& job = member.job;
  __shared__ double scratch[kMostWarps];
  const int count = job.size[side], first = block * points;
  double high = 0, total = 0;
  if (!job.dense) {
    const Surroundings around = SurroundingsOf<kSquares>(member);
    const double scale = around.scale;
    if (side == 0 && block == 0 && threadIdx.x == 0) member.state(0)->point_scale = scale;
    TensorView sphere;
    const TensorView& view = PointsOf<kSquares>(member, side, &sphere);
    const Centring<kSquares, kAtOnce> centring(member, view, side, scale);
    // Warps stay together; a point is read while the one before is centred.
    const int step = kThreads / centring.width();
    int k = threadIdx.x / centring.width();
    auto next = centring.Read(first + k);
#pragma unroll 1
    for (; k < points; k += step) {
      const auto value = next;
      if (k + step < points) next = centring.Read(first + k + step);
      high = fmax(high, centring.Centre(first + k, value, around.apart2));
    }
    __syncthreads();  // The shifts are there.
  }
  if (first >= count) return;  // Padding.
  const int i = first + threadIdx.x;
  if (static_cast<int>(threadIdx.x) < points && i < count) {
    const TensorView& view = side == 0 ? job.in.a : job.in.b;
    const double mass = view.data == nullptr ? 1.0 / count : LoadInput(view, member.index, count, i);
    member.mass(side)[i] = mass;
    member.log_mass(side)[i] = mass > 0 ? log2(mass) : kVoid;
    total = mass;
    const TensorView& initial = side == 0 ? job.in.initial_f : job.in.initial_g;
    const double f = initial.data == nullptr ? 0 : LoadInput(initial, member.index, count, i);
    member.phi(0, 0, side)[i] = f - member.Shift(0, side, i);
    if (job.engines > 1) {
      for (int s = 0; s < 2; ++s) member.phi(1 + side, 0, s)[i] = -member.Shift(1 + side, s, i);
    }
    if (job.streamed || job.framed || LoopsClouds(job)) PrepareSweeps(member, side, i, f);
  }
  high = BlockMax(high, scratch);
#pragma unroll
  for (int lane = kStatsPoints / 2; lane > 0; lane /= 2) total += __shfl_xor_sync(0xffffffffu, total, lane);
  if (threadIdx.x % kStatsPoints != 0 || static_cast<int>(threadIdx.x) >= points || i >= count) return;
  ChunkStats* stats = member.At<ChunkStats>(job.at.chunk_stats) + (job.dense ? CostChunks(job) : 0);
  stats[(side == 0 ? 0 : PointStats(job, 0)) + i / kStatsPoints] = {0, high, total};
}

// What step 3 left out of a lean job whose data need more than halves.
__device__ __noinline__ inline void RestorePoints(const Member& member) {
  const Job& job = member.job;
  for (int side = 0; side < 2; ++side) {
    const TensorView& view = side == 0 ? job.in.x : job.in.y;
    const double* centre = member.At<double>(job.at.centre[side]);
    const int64_t size = int64_t{job.size[side]} * job.dim;
    for (int64_t e = threadIdx.x; e < size; e += kThreads) {
      double value = LoadInput(view, member.index, size, e) - centre[e % job.dim];
      if (job.precision == Precision::kFast) value = RoundedTo11Bits(value);
      member.At<double>(job.at.points64[side])[e] = value;
      member.At<float>(job.at.points32[side])[e] = static_cast<float>(value);
    }
  }
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_PREPARE_POINTS_CUH_
