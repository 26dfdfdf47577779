// Inputs to the workspace: points centred on their own mean, masses and their logarithms, first potentials, and from
// the data's ranges the arithmetic that each member needs.
//
// Step 0  cosines: points on the unit sphere
// Step 1  sums and ranges of chunks of points, ranges of chunks of costs
// Step 2  centres and boxes of the clouds
// Step 3  points, as sums of two halves too (of lean jobs alone), norms, masses, potentials
// Step 4  states, and what lean jobs turn out to lack
//
// Shifts of points x + c and y + e, x and y centred. What depends on one side alone goes into its own:
//   kappa |x + d - y|^2 = kappa (|x|^2 + |y|^2 + 2 <x, d> - 2 <y, d> + |d|^2) - 2 kappa <x, y>,  d = c - e;
//   -<x + c, y + e>     = -<x, e> - <y, c> - <c, e> - <x, y>.
//
// FAST rounds centred coordinates to 11 bits once, before anything is made of them, so that norms and products agree:
// its answers are exact for clouds displaced by the rounding.
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_prepare_states.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// Step 0: one warp a point. The largest coordinate is taken out first: no square over- or underflows.
__device__ void NormalizePoints(const Member& member, int side, int block) {
  const Job& job = member.job;
  const TensorView& view = side == 0 ? job.in.x : job.in.y;
  const int dim = job.dim, count = job.size[side], first = block * kBlockPoints, lane = threadIdx.x % 32;
  for (int i = first + static_cast<int>(threadIdx.x) / 32; i < min(count, first + kBlockPoints); i += kWarps) {
    double* out = member.At<double>(job.at.points64[side]) + int64_t{i} * dim;
    double largest = 0, norm2 = 0;
    for (int k = lane; k < dim; k += 32) {
      out[k] = LoadInput(view, member.index, int64_t{count} * dim, int64_t{i} * dim + k);
      largest = fmax(largest, fabs(out[k]));
    }
    for (int other = 16; other > 0; other /= 2) largest = fmax(largest, __shfl_xor_sync(0xffffffffu, largest, other));
    if (!(largest > 0)) largest = 1;
    for (int k = lane; k < dim; k += 32) {
      out[k] /= largest;
      norm2 += out[k] * out[k];
    }
    for (int other = 16; other > 0; other /= 2) norm2 += __shfl_xor_sync(0xffffffffu, norm2, other);
    const double norm = norm2 > 0 ? sqrt(norm2) : 1;
    for (int k = lane; k < dim; k += 32) out[k] /= norm;
    if (lane == 0) member.At<double>(job.at.length[side])[i] = largest * norm;
  }
}

// A cloud before it is centred: as given, or where step 0 left it.
template <bool kSquares>
__device__ const TensorView& PointsOf(const Member& member, int side, TensorView* sphere) {
  const Job& job = member.job;
  if (kSquares || !IsCosine(job)) return side == 0 ? job.in.x : job.in.y;
  *sphere = {DType::kFloat64, member.At<double>(job.at.points64[side]), /*shared=*/true};
  return *sphere;
}

// Coordinates side by side of a tensor whose entries for the member begin at `first`.
template <int kWidth, typename Number>
__device__ void LoadCoordinates(const TensorView& view, int64_t first, int64_t e, Number (&to)[kWidth]) {
  if constexpr (kWidth == 4) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(view.data) + first + e));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else {
    to[0] = LoadDouble(view.dtype, view.data, first + e);
  }
}
// Whether float32 coordinates may be read so many at a time.
__device__ bool AreSideBySide(const TensorView& view, int dim, int width) {
  return view.dtype == DType::kFloat32 && dim % width == 0 &&
         reinterpret_cast<uintptr_t>(view.data) % (width * sizeof(float)) == 0;
}

// Step 1, points: a block adds up a slice of the coordinates of a chunk of points; thread t kWidth of them, those at
// t % lanes (or further), of every rows-th row. Float32 numbers are added up in eights, so that few are made double: as
// eighths, which do not overflow below 1.7e38, of what they are more than the chunk's first point, which may be far
// from 0.
template <int kWidth>
__device__ void SumCoordinates(const Member& member, const TensorView& view, int side, int chunk, int slice) {
  using Number = std::conditional_t<kWidth == 4, float, double>;
  constexpr int kTogether = 8;
  const Job& job = member.job;
  __shared__ double scratch[3][kWidth][kThreads];
  const int dim = job.dim, count = job.size[side], begin = slice * SliceCoordinates(job, side) / kWidth;
  const int groups = min(dim, (slice + 1) * SliceCoordinates(job, side)) / kWidth - begin;
  const int lanes = min(groups, kThreads), rows = kThreads / lanes;
  const int lane = threadIdx.x % lanes, row = threadIdx.x / lanes;
  const int first = chunk * ChunkPoints(count), last = min(count, first + ChunkPoints(count));
  const int64_t start = view.shared ? 0 : member.index * count * dim;
  double* out = member.At<double>(job.at.chunk_sums[side]) + int64_t{3} * dim * chunk;
  double* centre = count <= ChunkPoints(count) ? member.At<double>(job.at.centre[side]) : nullptr;  // All are here.
  for (int g0 = 0; g0 < groups; g0 += lanes) {
    const int k = (begin + g0 + lane) * kWidth;
    double sum[kWidth];
    Number low[kWidth], high[kWidth];
#pragma unroll
    for (int q = 0; q < kWidth; ++q) sum[q] = 0, low[q] = INFINITY, high[q] = -INFINITY;
    if (row < rows && g0 + lane < groups) {
      constexpr Number kEighth = 0.125;
      Number base[kWidth];
      LoadCoordinates(view, start, int64_t{first} * dim + k, base);
      int taken = 0;
      for (int i0 = first + row; i0 < last; i0 += kTogether * rows) {
        Number value[kTogether][kWidth], part[kWidth] = {};
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          if (i0 + t * rows >= last) break;
          LoadCoordinates(view, start, int64_t{i0 + t * rows} * dim + k, value[t]);
        }
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          if (i0 + t * rows >= last) break;
          ++taken;
#pragma unroll
          for (int q = 0; q < kWidth; ++q) {
            part[q] += fma(value[t][q], kEighth, -kEighth * base[q]);
            low[q] = min(low[q], value[t][q]);
            high[q] = max(high[q], value[t][q]);
          }
        }
#pragma unroll
        for (int q = 0; q < kWidth; ++q) sum[q] += part[q];
      }
#pragma unroll
      for (int q = 0; q < kWidth; ++q) sum[q] = sum[q] / kEighth + static_cast<double>(taken) * base[q];
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < kWidth; ++q) {
      scratch[0][q][threadIdx.x] = sum[q];
      scratch[1][q][threadIdx.x] = low[q];
      scratch[2][q][threadIdx.x] = high[q];
    }
    __syncthreads();
    // A thread for each coordinate.
    for (int e = threadIdx.x; e < min(lanes, groups - g0) * kWidth; e += kThreads) {
      const int q = e % kWidth, at = e / kWidth, to = (begin + g0) * kWidth + e;
      double all = 0, least = INFINITY, most = -INFINITY;
#pragma unroll 8
      for (int r = 0; r < min(rows, last - first); ++r) {
        all += scratch[0][q][r * lanes + at];
        least = fmin(least, scratch[1][q][r * lanes + at]);
        most = fmax(most, scratch[2][q][r * lanes + at]);
      }
      out[to] = all;
      if (centre != nullptr) centre[to] = all / count;
      out[dim + to] = least;
      out[2 * dim + to] = most;
    }
  }
}
template <bool kSquares>
__device__ void SumChunk(const Member& member, int side, int block) {
  const int slices = Slices(member.job, side), chunk = block / slices, slice = block % slices;
  TensorView sphere;
  const TensorView& view = PointsOf<kSquares>(member, side, &sphere);
  if (AreSideBySide(view, member.job.dim, 4)) return SumCoordinates<4>(member, view, side, chunk, slice);
  SumCoordinates<1>(member, view, side, chunk, slice);
}

__device__ void RangeOfCosts(const Member& member, int64_t chunk) {
  const Job& job = member.job;
  __shared__ double scratch[kMostWarps];
  const int64_t size = int64_t{job.size[0]} * job.size[1];
  const int64_t last = min(size, (chunk + 1) * kChunkCosts);
  double low = INFINITY, high = -INFINITY;
  for (int64_t i = chunk * kChunkCosts + threadIdx.x; i < last; i += kThreads) {
    const double cost = LoadInput(job.in.cost, member.index, size, i);
    low = fmin(low, cost);
    high = fmax(high, cost);
  }
  low = -BlockMax(-low, scratch);
  high = BlockMax(high, scratch);
  if (threadIdx.x == 0) member.At<ChunkStats>(job.at.chunk_stats)[chunk] = {low, high, 0};
}

// Step 2, unless one chunk has all: the chunks' sums to the centre; their ranges to those of the cloud, in place of the
// first chunk's. A block has kCentreLanes coordinates; a warp every kWarps-th chunk of them.
__device__ void CentreOf(const Member& member, int side, int block) {
  const Job& job = member.job;
  __shared__ double scratch[3][kWarps][kCentreLanes];
  const int dim = job.dim, chunks = PointChunks(job, side), lane = threadIdx.x % kCentreLanes;
  const int warp = threadIdx.x / kCentreLanes, k = block * kCentreLanes + lane;
  double* in = member.At<double>(job.at.chunk_sums[side]);
  double sum = 0, low = INFINITY, high = -INFINITY;
#pragma unroll 4
  for (int c = warp; c < chunks && k < dim; c += kWarps) {
    const double* chunk = in + int64_t{3} * dim * c;
    sum += chunk[k];
    low = fmin(low, chunk[dim + k]);
    high = fmax(high, chunk[2 * dim + k]);
  }
  scratch[0][warp][lane] = sum;
  scratch[1][warp][lane] = low;
  scratch[2][warp][lane] = high;
  __syncthreads();  // All have read.
  if (warp > 0 || k >= dim) return;
  for (int w = 1; w < kWarps; ++w) {
    sum += scratch[0][w][lane];
    low = fmin(low, scratch[1][w][lane]);
    high = fmax(high, scratch[2][w][lane]);
  }
  in[dim + k] = low;
  in[2 * dim + k] = high;
  member.At<double>(job.at.centre[side])[k] = sum / job.size[side];
}

// To 11 significant bits, ties to even; of numbers below 2^-1022 to as many places as those of 2^-1022 have.
__device__ double RoundedTo11Bits(double value) {
  constexpr int kDropped = 52 - 10;
  const auto bits = static_cast<uint64_t>(__double_as_longlong(value));
  const uint64_t below_half = (uint64_t{1} << (kDropped - 1)) - 1;
  const uint64_t rounded = (bits + below_half + (bits >> kDropped & 1)) >> kDropped << kDropped;
  return __longlong_as_double(static_cast<int64_t>(rounded));
}

// Lanes that share a point: 4 to 32, side by side.
struct Lanes {
  int width, lane;

  __device__ double Sum(double value) const {
#pragma unroll 1
    for (int other = width / 2; other > 0; other /= 2) value += __shfl_xor_sync(0xffffffffu, value, other);
    return value;
  }
  __device__ void Sum(double* x, double* y) const {
#pragma unroll 1
    for (int other = width / 2; other > 0; other /= 2) {
      const double more = __shfl_xor_sync(0xffffffffu, *x, other);
      *y += __shfl_xor_sync(0xffffffffu, *y, other);
      *x += more;
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
__device__ int PaddedCoordinates(const Job& job) {
  if (!job.halves) return job.dim;
  return job.dim > kDepth ? CloudDepths(job.dim) * kDepth : CloudRowBytes(job.dim) / static_cast<int>(sizeof(__half));
}

// Step 3: points of a side, each by some lanes that take two coordinates in turn. What a point needs of the job is read
// once for all of them. What lies behind the last point is padding.
template <bool kSquares>
class Centring {
 public:
  __device__ Centring(const Member& member, const TensorView& view, int side, double scale)
      : member_(member),
        side_(side),
        dim_(member.job.dim),
        count_(member.job.size[side]),
        padded_(PaddedCoordinates(member.job)),
        dtype_(view.dtype),
        pairs_(AreSideBySide(view, member.job.dim, 2)),
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
    int width = 4;
    while (width < 32 && 2 * width < padded_) width *= 2;
    lanes_ = {width, static_cast<int>(threadIdx.x) % width};
    if (lanes_.lane * 2 < dim_) Centres(lanes_.lane * 2, &own_, &apart_);
  }
  // Lanes that share a point.
  __device__ int width() const { return lanes_.width; }

  // Coordinates 2 lane and 2 lane + 1 of point i, as they are.
  __device__ double2 Read(int64_t i) const {
    return i < count_ && 2 * lanes_.lane < dim_ ? Load(i, 2 * lanes_.lane) : make_double2(0, 0);
  }
  // Point i, whose first coordinates `value` are; its squared norm. `apart2`: the centres' squared distance.
  __device__ double Centre(int64_t i, double2 value, double apart2) const {
    const bool there = i < count_;
    double norm2 = 0, along = 0;
    int k = 2 * lanes_.lane;
    if (k < padded_) Place(i, k, value, own_, apart_, &norm2, &along);
#pragma unroll 1
    for (k += 2 * lanes_.width; k < padded_; k += 2 * lanes_.width) {
      double2 own = {0, 0}, apart = {0, 0}, more = {0, 0};
      if (there && k < dim_) {
        more = Load(i, k);
        Centres(k, &own, &apart);
      }
      Place(i, k, more, own, apart, &norm2, &along);
    }
    lanes_.Sum(&norm2, &along);
    double linear = kappa_ * (side_ == 0 ? 2 * along + apart2 : -2 * along), square = kappa_ * norm2;
    if (!kSquares) Others(i, norm2, square, &linear);
    if (there && lanes_.lane == 0) {
      linear_[i] = linear;
      norm2_[i] = together_ ? 0 : square;
    }
    return there ? norm2 : 0;
  }

 private:
  __device__ double2 Load(int64_t i, int k) const {
    const int64_t e = first_ + i * dim_ + k;
    if (pairs_) {
      const float2 both = __ldg(reinterpret_cast<const float2*>(in_ + e * sizeof(float)));
      return make_double2(both.x, both.y);
    }
    return make_double2(LoadDouble(dtype_, in_, e), k + 1 < dim_ ? LoadDouble(dtype_, in_, e + 1) : 0);
  }
  // What is taken off coordinates k and k + 1, and how far the centres are apart there.
  __device__ void Centres(int k, double2* own, double2* apart) const {
    const int next = min(k + 1, dim_ - 1);
    const double2 mine = {centre_[k], centre_[next]}, other = {theirs_[k], theirs_[next]};
    *apart = side_ == 0 ? make_double2(mine.x - other.x, mine.y - other.y)
                        : make_double2(other.x - mine.x, other.y - mine.y);
    *own = together_ ? make_double2((mine.x + other.x) / 2, (mine.y + other.y) / 2) : mine;
  }
  // Coordinates k and k + 1 of point i: centred, stored, and added up.
  __device__ void Place(int64_t i, int k, double2 value, double2 own, double2 apart, double* norm2,
                        double* along) const {
    const bool there = i < count_ && k < dim_, both = k + 1 < dim_;
    value = {there ? value.x - own.x : 0, there && both ? value.y - own.y : 0};
    if (rounds_ && !together_) value = {RoundedTo11Bits(value.x), RoundedTo11Bits(value.y)};
    *norm2 += value.x * value.x + value.y * value.y;
    *along += value.x * apart.x + value.y * apart.y;
    const float2 less = {static_cast<float>(value.x), static_cast<float>(value.y)};
    if (!there || !stores_) {
      // Halves are all that is wanted.
    } else if (dim_ % 2 == 0) {
      *reinterpret_cast<double2*>(points64_ + i * dim_ + k) = value;
      if (has_floats_) *reinterpret_cast<float2*>(points32_ + i * dim_ + k) = less;
    } else {
      points64_[i * dim_ + k] = value.x;
      if (both) points64_[i * dim_ + k + 1] = value.y;
      if (has_floats_) points32_[i * dim_ + k] = less.x;
      if (has_floats_ && both) points32_[i * dim_ + k + 1] = less.y;
    }
    if (halves_) Split(i, k, {static_cast<float>(value.x * scale_), static_cast<float>(value.y * scale_)});
  }
  // x scale = high + low + what is below 2^-22 of it; FAST has no low.
  __device__ void Split(int64_t i, int k, float2 value) const {
    const int64_t plane_bytes = int64_t{kCloudTile} * row_bytes_;
    const int place = static_cast<int>(i % kCloudTile);
    char* to = to_ + (i / kCloudTile * CloudDepths(dim_) + k / kDepth) * planes_ * plane_bytes +
               SwizzledAt(place, k % kDepth / 8, row_bytes_) + k % 8 * sizeof(__half);
    const __half2 high = __float22half2_rn(value);
    *reinterpret_cast<__half2*>(to) = high;
    if (planes_ == 1) return;
    const float2 there = __half22float2(high);
    *reinterpret_cast<__half2*>(to + plane_bytes) = __floats2half2_rn(value.x - there.x, value.y - there.y);
  }
  // Of costs that are no squared distances.
  __device__ void Others(int64_t i, double norm2, double square, double* linear) const {
    const Job& job = member_.job;
    const bool tells = i < count_ && lanes_.lane == 0;
    if (together_) *linear = 0;
    if (together_ && tells && halves_) member_.At<double>(job.at.length[side_])[i] = norm2;
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
  const bool pairs_, halves_;
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
  double2 own_ = {0, 0}, apart_ = {0, 0};  // Centres of this lane's first coordinates.
};

// What sweeps read before it is known whether they are to do anything: of points that engines have on a side of theirs.
// `f`: the point's initial potential.
__device__ inline void PrepareSweeps(const Member& member, int side, int i, double f) {
  const Job& job = member.job;
  if (side == 1 && i == 0) *member.At<double>(job.at.stream_reference) = job.dense ? f : 0;
  for (int e = 0; e < job.engines; ++e) {
    for (int s = 0; s < 2; ++s) {
      if (MeasureOf(e, s) != side) continue;
      member.phi(e, 1, s)[i] = 0;
      if (HasFrames(job)) member.At<double>(job.at.frame[e][s])[i] = 0;
    }
  }
}

template <bool kSquares>
__device__ void PreparePoints(const Member& member, int side, int block) {
  const Job& job = member.job;
  __shared__ double scratch[kMostWarps];
  const int count = job.size[side], first = block * kBlockPoints;
  double high = 0, total = 0;
  if (!job.dense) {
    const Surroundings around = SurroundingsOf<kSquares>(member);
    const double scale = around.scale;
    if (side == 0 && block == 0 && threadIdx.x == 0) member.state(0)->point_scale = scale;
    TensorView sphere;
    const TensorView& view = PointsOf<kSquares>(member, side, &sphere);
    const Centring<kSquares> centring(member, view, side, scale);
    // Warps stay together; a point is read while the one before is centred.
    const int step = kThreads / centring.width();
    int k = threadIdx.x / centring.width();
    double2 next = centring.Read(first + k);
#pragma unroll 1
    for (; k < kBlockPoints; k += step) {
      const double2 value = next;
      if (k + step < kBlockPoints) next = centring.Read(first + k + step);
      high = fmax(high, centring.Centre(first + k, value, around.apart2));
    }
    __syncthreads();  // The shifts are there.
  }
  if (first >= count) return;  // Padding.
  const int i = first + threadIdx.x;
  if (threadIdx.x < kBlockPoints && i < count) {
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
    if (job.streamed || job.framed) PrepareSweeps(member, side, i, f);
  }
  high = BlockMax(high, scratch);
  total = BlockSum(total, scratch);
  if (threadIdx.x != 0) return;
  ChunkStats* stats = member.At<ChunkStats>(job.at.chunk_stats) + (job.dense ? CostChunks(job) : 0);
  stats[side == 0 ? block : PointBlocks(job, 0) + block] = {0, high, total};
}

// What step 3 left out of a lean job whose data need more than halves.
__device__ __noinline__ void RestorePoints(const Member& member) {
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

// kSquares: of jobs that IsSquared alone.
template <bool kSquares, int kStep>
__global__ void __launch_bounds__(kThreads, kStep == kRangesStep ? 3 : 4) PrepareKernel(LaunchTable table) {
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  AwaitKernelBefore();
  if constexpr (kStep == kStatesStep) {
    const Member member{job, work.block};
    PrepareStates<kSquares>(member);
    if (!kSquares || !job.lean) return;
    __syncthreads();  // The state is there.
    if (member.state(0)->mode != kFloat) RestorePoints(member);
  } else if constexpr (kStep == kCentresStep) {
    const int64_t of_side = CeilDiv(job.dim, kCentreLanes), rest = work.block % (2 * of_side);
    CentreOf(Member{job, work.block / (2 * of_side)}, rest < of_side ? 0 : 1, static_cast<int>(rest % of_side));
  } else {
    if (kStep == kRangesStep && job.dense) {
      const int64_t of_member = CostChunks(job);
      return RangeOfCosts(Member{job, work.block / of_member}, work.block % of_member);
    }
    int chunks[2];
    for (int side = 0; side < 2; ++side) {
      chunks[side] = kStep == kRangesStep   ? PointChunks(job, side) * Slices(job, side)
                     : kStep == kPointsStep ? PaddedPointBlocks(job, side)
                                            : PointBlocks(job, side);
    }
    const int64_t of_member = chunks[0] + chunks[1];
    const Member member{job, work.block / of_member};
    const int64_t rest = work.block % of_member;
    const int side = rest < chunks[0] ? 0 : 1, chunk = static_cast<int>(side == 0 ? rest : rest - chunks[0]);
    if constexpr (kStep == kSphereStep) {
      NormalizePoints(member, side, chunk);
    } else if constexpr (kStep == kPointsStep) {
      PreparePoints<kSquares>(member, side, chunk);
    } else {
      SumChunk<kSquares>(member, side, chunk);
    }
  }
}

template <bool kSquares>
void LaunchStep(const LaunchTable& table, int64_t blocks, int step, cudaStream_t stream) {
  switch (step) {
    case kSphereStep:
      return LaunchNext(PrepareKernel<false, kSphereStep>, blocks, kThreads, 0, stream, table);
    case kRangesStep:
      return LaunchNext(PrepareKernel<kSquares, kRangesStep>, blocks, kThreads, 0, stream, table);
    case kCentresStep:
      return LaunchNext(PrepareKernel<true, kCentresStep>, blocks, kThreads, 0, stream, table);
    case kPointsStep:
      return LaunchNext(PrepareKernel<kSquares, kPointsStep>, blocks, kThreads, 0, stream, table);
    default:
      return LaunchNext(PrepareKernel<kSquares, kStatesStep>, blocks, kThreads, 0, stream, table);
  }
}

}  // namespace

int64_t PrepareBlocks(const Job& job, int step) {
  switch (step) {
    case kSphereStep:
      return IsCosine(job) ? PointBlocks(job, 0) + PointBlocks(job, 1) : 0;
    case kRangesStep:
      return job.dense ? CostChunks(job) : PointChunks(job, 0) * Slices(job, 0) + PointChunks(job, 1) * Slices(job, 1);
    case kCentresStep:
      return job.dense || PointChunks(job, 0) * PointChunks(job, 1) == 1 ? 0 : 2 * CeilDiv(job.dim, kCentreLanes);
    case kPointsStep:
      return PaddedPointBlocks(job, 0) + PaddedPointBlocks(job, 1);
    default:
      return 1;
  }
}

int64_t PreparedStats(const Job& job) {
  return (job.dense ? CostChunks(job) : 0) + PointBlocks(job, 0) + PointBlocks(job, 1);
}

void LaunchPrepare(const LaunchTable& table, int64_t blocks, bool squares, int step, cudaStream_t stream) {
  squares ? LaunchStep<true>(table, blocks, step, stream) : LaunchStep<false>(table, blocks, step, stream);
}

}  // namespace cuda
}  // namespace sinkhorn
