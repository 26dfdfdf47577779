// Hessian-vector products of cosines by the chain rule through the normalisation (kernels/cpu/transport_directions.h):
//
//   x = p / |p|,  J = (1 - x x^T) / |p|.  Along dp, x moves by w = J dp, and the gradient J g of the points p by
//   J (dg) - (w <x, g> + x <w, g>) / |p| - <x, dp> / |p| J g,   dg the product on the sphere, g the gradient there.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_hessian.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kBlockPoints = 64;

// A point on the sphere, coordinates by the lanes of a warp.
struct SpherePoint {
  const double *centred, *centre;
  double length;
  __device__ double operator[](int k) const { return centred[k] + centre[k]; }
};
__device__ inline SpherePoint PointAt(const Member& member, int measure, int64_t i) {
  const Job& job = member.job;
  return {member.At<double>(job.at.points64[measure]) + i * job.dim, member.At<double>(job.at.centre[measure]),
          member.At<double>(job.at.length[measure])[i]};
}
// sum over k of entry(k), in every lane.
template <typename Entry>
__device__ inline double WarpSum(int dim, Entry entry) {
  double sum = 0;
  for (int k = threadIdx.x % 32; k < dim; k += 32) sum += entry(k);
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  return sum;
}

// w = J dp. A warp a point and direction.
__device__ void Enter(const Member& member, int measure, int64_t q, int64_t i) {
  const Job& job = member.job;
  const Steps given = GivenSteps(member, measure, q);
  if (given.data == nullptr) return;
  const SpherePoint x = PointAt(member, measure, i);
  double* out = StepDoublesOf(member, measure) + (q * job.size[measure] + i) * job.dim;
  const double along = WarpSum(job.dim, [&](int k) { return given.At<double>(i * job.dim + k) * x[k]; });
  for (int k = threadIdx.x % 32; k < job.dim; k += 32) {
    out[k] = (given.At<double>(i * job.dim + k) - along * x[k]) / x.length;
  }
}

__device__ void Leave(const Member& member, int measure, int64_t q, int64_t i) {
  const Job& job = member.job;
  const int dim = job.dim;
  const OutputView& out = ProductOf(job, measure);
  if (out.data == nullptr) return;
  const SpherePoint x = PointAt(member, measure, i);
  const int64_t at = (q * job.size[measure] + i) * dim;
  const double* product = SphereProducts(member, measure) + at;
  const double* g = member.At<double>(job.at.gradient[measure]) + i * dim;
  const Steps given = GivenSteps(member, measure, q);
  const double* w = StepDoublesOf(member, measure) + at;
  const bool moves = given.data != nullptr;
  const double along = WarpSum(dim, [&](int k) { return x[k] * product[k]; });
  const double g_along = WarpSum(dim, [&](int k) { return x[k] * g[k]; });
  const double step_g = WarpSum(dim, [&](int k) { return moves ? w[k] * g[k] : 0; });
  const double given_along = WarpSum(dim, [&](int k) { return moves ? x[k] * given.At<double>(i * dim + k) : 0; });
  for (int k = threadIdx.x % 32; k < dim; k += 32) {
    const double turned = (g[k] - x[k] * g_along) / x.length, step = moves ? w[k] : 0;
    const double all = product[k] - x[k] * along - step * g_along - x[k] * step_g - given_along * turned;
    StoreOutput(out, member.index * job.in.hessian.count * job.size[measure] * dim + at + k, all / x.length);
  }
}

__host__ __device__ int64_t Blocks(const Job& job, int measure) {
  return IsCosine(job) ? CeilDiv(job.size[measure], kBlockPoints) : 0;
}

__global__ void __launch_bounds__(kThreads) SphereKernel(LaunchTable table, bool leaving) {
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t of_x = Blocks(job, 0), blocks = of_x + Blocks(job, 1), count = job.in.hessian.count;
  const int64_t block = work.block % blocks, q = work.block / blocks % count;
  const Member member{job, work.block / blocks / count};
  if (leaving && !AreDone(member)) return;
  const int measure = block < of_x ? 0 : 1;
  const int64_t first = (measure == 0 ? block : block - of_x) * kBlockPoints;
  const int64_t last = min(int64_t{job.size[measure]}, first + kBlockPoints);
  for (int64_t i = first + threadIdx.x / 32; i < last; i += kThreads / 32) {
    leaving ? Leave(member, measure, q, i) : Enter(member, measure, q, i);
  }
}

}  // namespace

int64_t SphereBlocks(const Job& job) { return job.in.hessian.count * (Blocks(job, 0) + Blocks(job, 1)); }
void LaunchSphere(const LaunchTable& table, int64_t blocks, bool leaving, cudaStream_t stream) {
  LaunchKernel(SphereKernel, blocks, kThreads, 0, stream, table, leaving);
}

}  // namespace cuda
}  // namespace sinkhorn
