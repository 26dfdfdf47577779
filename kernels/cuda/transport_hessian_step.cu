// What Hessian-vector products do between their sweeps: right-hand sides, preconditioned conjugate gradients, and the
// check of what they found. One block a direction of an engine: its vectors take far less time than a sweep.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_control.cuh"
#include "kernels/cuda/transport_hessian.cuh"
#include "kernels/cuda/transport_hopper.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kStepThreads = 512;
constexpr int kWarps = kThreads / 32;

// ---- Start --------------------------------------------------------------------------------------------------------

__device__ void StartPoint(const Member& member, const ProductVectors& v, int engine, int side, int64_t i) {
  const Job& job = member.job;
  const double rho = RhoOf(job, engine, side), mass = member.mass(MeasureOf(engine, side))[i];
  const double f = member.phi(engine, member.state(engine)->parity, side)[i] + member.Shift(engine, side, i);
  const double extra = isinf(rho) ? 0 : job.solver.epsilon / rho * mass * exp(-f / rho);
  const double diagonal = (mass > 0 ? mass * member.ratio(engine, side)[i] : 0) + extra;
  v.extra(side)[i] = extra;
  v.inverse(side)[i] = diagonal > 0 ? 1 / diagonal : 0;
  if (side == 1) v.diagonal()[i] = diagonal;
  for (int64_t q = 0; q < v.count; ++q) {
    v.potential(side, q)[i] = 0;
    if (side == 1) v.step(q)[i] = 0;
  }
}

// u_i = <dx_i, grad of C's terms of the row>, v_j likewise. A warp a point.
__device__ void ShiftPoint(const Member& member, const ProductVectors& v, int engine, int side, int64_t i) {
  const Job& job = member.job;
  for (int64_t q = 0; q < v.count; ++q) {
    const Steps steps = StepsOf(member, MeasureOf(engine, side), q);
    double sum = 0;
    for (int k = threadIdx.x % 32; k < job.dim && steps.data != nullptr; k += 32) {
      sum += steps.At<double>(i * job.dim + k) * ApartOf(member, engine, side, i, k);
    }
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (threadIdx.x % 32 == 0) v.shift(side, q)[i] = 2 * job.in.kappa * sum;
  }
}

__host__ __device__ int64_t StartBlocks(const Job& job, int engine, int side) {
  return CeilDiv(EngineSize(job, engine, side), kTile);
}

__host__ __device__ int64_t AllStartBlocks(const Job& job) {
  int64_t blocks = 0;
  for (int e = 0; e < job.engines; ++e) blocks += StartBlocks(job, e, 0) + StartBlocks(job, e, 1);
  return blocks;
}

__global__ void __launch_bounds__(kThreads) StartKernel(LaunchTable table) {
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t blocks = AllStartBlocks(job);
  const Member member{job, work.block / blocks};
  int64_t block = work.block % blocks;
  int engine = 0, side = 0;
  for (; block >= StartBlocks(job, engine, side); engine += side, side ^= 1) block -= StartBlocks(job, engine, side);
  const ProductVectors v = VectorsOf(member, engine);
  if (block == 0 && side == 0) {
    for (int64_t q = threadIdx.x; q < v.count; q += kThreads) {
      v.states[q] = {0, 0, INFINITY, 0, HasProducts(job, engine) ? Phase::kReduce : Phase::kDone, 0, 0, 0, 0};
    }
    for (int64_t k = threadIdx.x; k < SweepGroups(job) * v.row_blocks; k += kThreads) v.arrivals[k] = 0;
  }
  if (!HasProducts(job, engine)) return;
  const int64_t first = block * kTile, last = min(v.size[side], first + kTile);
  for (int64_t i = first + threadIdx.x; i < last; i += kThreads) StartPoint(member, v, engine, side, i);
  for (int64_t i = first + threadIdx.x / 32; i < last; i += kWarps) ShiftPoint(member, v, engine, side, i);
}

// ---- Steps --------------------------------------------------------------------------------------------------------

// A direction between two pairs of sweeps. Every thread has the state, and the same.
class Direction {
 public:
  __device__ Direction(const Job& job, const ProductVectors& v, int engine, int64_t q, double* scratch)
      : options_(job.in.hessian),
        size_(static_cast<int>(v.size[1])),
        balanced_(isinf(RhoOf(job, engine, 0)) && isinf(RhoOf(job, engine, 1))),
        scratch_(scratch),
        diagonal_(v.diagonal()),
        inverse_(v.inverse(1)),
        condition_(v.condition()),
        right_(v.right(1, q)),
        potential_(v.potential(1, q)),
        image_(v.image(1, q)),
        residual_(v.residual(q)),
        step_(v.step(q)),
        conditioned_(v.conditioned(q)),
        s_(v.states[q]) {}

  // After a pair of sweeps.
  __device__ DirectionState Advance() {
    switch (s_.phase) {
      case Phase::kReduce:
        EndReduce();
        break;
      case Phase::kMultiply:
        EndMultiply();
        break;
      case Phase::kNeumann:
        EndNeumann();
        break;
      case Phase::kCheck:
        EndCheck();
        break;
      case Phase::kDone:
        break;
    }
    return s_;
  }

 private:
  // visit(j) of every column; its values' sum.
  template <typename Visit>
  __device__ double Sum(Visit visit) {
    double sum = 0;
#pragma unroll 4
    for (int j = threadIdx.x; j < size_; j += kStepThreads) sum += visit(j);
    return BlockSum(sum, scratch_);
  }
  template <typename Visit>
  __device__ void ForEach(Visit visit) {
#pragma unroll 4
    for (int j = threadIdx.x; j < size_; j += kStepThreads) visit(j);
  }

  __device__ void EndReduce() {
    s_.total = Sum([&](int j) { return diagonal_[j]; });
    const double sum = Sum([&](int j) { return residual_[j] = diagonal_[j] > 0 ? right_[j] - image_[j] : 0; });
    s_.norm = ProjectedNorm(sum);
    ForEach([&](int j) { right_[j] = residual_[j]; });
    s_.norm > 0 ? Condition() : Check();
  }

  __device__ void EndMultiply() {
    const auto product = [&](int j) { return diagonal_[j] * step_[j] - image_[j]; };
    const double curvature = Sum([&](int j) { return step_[j] * product(j); });
    const double length = curvature > 0 ? s_.inner / curvature : 0;
    const double sum = Sum([&](int j) {
      potential_[j] += length * step_[j];
      return residual_[j] -= length * product(j);
    });
    const double norm = ProjectedNorm(sum);
    ++s_.iterations;
    // Rounding may leave no curvature at all.
    const bool active = length > 0 && norm > options_.tolerance * s_.norm && s_.iterations < options_.max_iterations;
    active ? Condition() : Check();
  }

  // conditioned = M^-1 residual, perhaps after some sweeps.
  __device__ void Condition() {
    ForEach([&](int j) { conditioned_[j] = residual_[j] * condition_[j]; });
    s_.neumann_left = options_.preconditioner == Preconditioner::kNeumann ? options_.neumann_terms : 0;
    s_.neumann_left > 0 ? Go(Phase::kNeumann) : TakeStep();
  }

  // sum over l of (diag^-1 P^T diag^-1 P)^l diag^-1, by Horner's rule.
  __device__ void EndNeumann() {
    ForEach([&](int j) { conditioned_[j] = (residual_[j] + image_[j]) * inverse_[j]; });
    if (--s_.neumann_left == 0) TakeStep();
  }

  __device__ void TakeStep() {
    const double inner = Sum([&](int j) { return residual_[j] * conditioned_[j]; });
    const double keep = s_.inner > 0 ? inner / s_.inner : 0;
    ForEach([&](int j) { step_[j] = conditioned_[j] + keep * step_[j]; });
    s_.inner = inner;
    Go(Phase::kMultiply);
  }

  __device__ void Check() { Go(Phase::kCheck); }

  // The residuals that were updated have drifted from those of the solution: these are told, and gone on with as long
  // as that helps.
  __device__ void EndCheck() {
    const double sum = Sum([&](int j) {
      return residual_[j] = diagonal_[j] > 0 ? right_[j] - (diagonal_[j] * potential_[j] - image_[j]) : 0;
    });
    const double norm = ProjectedNorm(sum), residual = s_.norm > 0 ? norm / s_.norm : 0;
    const bool active =
        residual > options_.tolerance && s_.iterations < options_.max_iterations && residual < s_.checked / 2;
    s_.checked = residual;
    s_.inner = 0;
    active ? Condition() : Go(Phase::kDone);
  }

  // Balanced: S reaches only what sums to zero, and the residual (`sum`: its) is projected there. Its norm: residuals
  // are masses, each column's counts relative to its own.
  __device__ double ProjectedNorm(double sum) {
    const double off = balanced_ ? sum / s_.total : 0;
    return sqrt(Sum([&](int j) {
      const double residual = residual_[j] -= off * diagonal_[j];
      return residual * residual * inverse_[j];
    }));
  }

  __device__ void Go(Phase phase) { s_.phase = phase; }

  const HessianInputs& options_;
  const int size_;
  const bool balanced_;
  double* const scratch_;
  const double* const diagonal_;
  const double* const inverse_;
  const double* const condition_;
  double *const right_, *const potential_;
  const double* const image_;
  double *const residual_, *const step_, *const conditioned_;
  DirectionState s_;
};

__global__ void __launch_bounds__(kStepThreads) StepKernel(LaunchTable table) {
  __shared__ double scratch[kMostWarps];
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t count = job.in.hessian.count, q = work.block % count;
  const int engine = static_cast<int>(work.block / count % job.engines);
  const ProductVectors v = VectorsOf(Member{job, work.block / count / job.engines}, engine);
  AwaitKernelBefore();
  if (v.states[q].phase == Phase::kDone) return;
  Direction direction(job, v, engine, q, scratch);
  const DirectionState next = direction.Advance();
  __syncthreads();  // All have read the state.
  if (threadIdx.x == 0) v.states[q] = next;
}

// ---- Reports ------------------------------------------------------------------------------------------------------

// How the directions of a member ended: the worst. Returns how many have not.
__device__ int EndsOf(const Member& member, HessianConvergence* worst) {
  const Job& job = member.job;
  int running = 0;
  *worst = {0, 0, true};
  for (int e = 0; e < job.engines; ++e) {
    const ProductVectors v = VectorsOf(member, e);
    for (int64_t q = 0; q < v.count && HasProducts(job, e); ++q) {
      const DirectionState& s = v.states[q];
      running += s.phase != Phase::kDone;
      worst->iterations = max(worst->iterations, s.iterations);
      if (!(s.checked <= worst->residual)) worst->residual = s.checked;
      worst->converged = worst->converged && s.checked <= job.in.hessian.tolerance;
    }
  }
  return running;
}

__global__ void __launch_bounds__(kThreads) ProductReportKernel(LaunchTable table, ProductReport* reports) {
  __shared__ double scratch[kMostWarps];
  AwaitKernelBefore();
  const Job& job = table.jobs[blockIdx.x];
  double running = 0;
  for (int64_t index = threadIdx.x; index < job.count; index += kThreads) {
    HessianConvergence worst;
    const int left = EndsOf(Member{job, index}, &worst);
    if (left == 0 && job.out.hessian_convergence != nullptr) job.out.hessian_convergence[index] = worst;
    running += left;
  }
  running = BlockSum(running, scratch);
  if (threadIdx.x == 0) reports[blockIdx.x].running = static_cast<int32_t>(fmin(running, 2e9));
}

}  // namespace

int64_t ProductBytesOf(const Job& job) { return ProductBytes(job); }

int64_t ProductStartBlocks(const Job& job) { return AllStartBlocks(job); }
int64_t ProductStepBlocks(const Job& job) { return job.in.hessian.count * job.engines; }

void LaunchProductStart(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchKernel(StartKernel, blocks, kThreads, 0, stream, table);
}
void LaunchProductStep(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchNext(StepKernel, blocks, kStepThreads, 0, stream, table);
}
void LaunchProductReport(const LaunchTable& table, ProductReport* reports, cudaStream_t stream) {
  LaunchNext(ProductReportKernel, table.job_count, kThreads, 0, stream, table, reports);
}

}  // namespace cuda
}  // namespace sinkhorn
