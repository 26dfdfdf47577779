#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "kernels/cuda/echo_family.h"
#include "kernels/cuda/launch.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kThreads = 256;  // REQUIRES: a Task has no more words.
constexpr size_t kTooMuchShared = size_t{1} << 30, kMuchShared = size_t{64} << 10;

struct Task {
  const float* cost;
  float *plan, *f;
  Convergence* convergence;
  int* slices;    // In the workspace: taken so far.
  int* finished;  // Host visible.
  int64_t count, n, m;
  int wanted;
  bool shared_cost, first, trap;
  long long wait_ns;
};

// Blocks of one problem stride over its elements.
__global__ void EchoKernel(const Task* tasks) {
  __shared__ Task task;
  if (threadIdx.x < sizeof(Task) / sizeof(int)) {  // One read of all of it: it may lie beyond the bus.
    reinterpret_cast<int*>(&task)[threadIdx.x] = reinterpret_cast<const int*>(&tasks[blockIdx.y])[threadIdx.x];
  }
  __syncthreads();
  if (task.trap) Trap();
  if (task.wait_ns > 0) {
    const unsigned long long begin = GlobalNanoseconds();
    while (static_cast<long long>(GlobalNanoseconds() - begin) < task.wait_ns) continue;
  }
  const int taken = task.first ? 1 : *task.slices + 1;  // EchoEndKernel changes it.
  if (taken != task.wanted) return;
  const int64_t elements = task.count * task.n * task.m, stride = int64_t{kThreads} * gridDim.x;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (task.plan != nullptr) {
    for (int64_t i = first; i < elements; i += stride) {
      task.plan[i] = 2 * task.cost[task.shared_cost ? i % (task.n * task.m) : i] + 1;
    }
  }
  if (task.f != nullptr) {
    for (int64_t row = first; row < task.count * task.n; row += stride) {
      const float* cost = task.cost + (task.shared_cost ? row % task.n : row) * task.m;
      float sum = 0;
      for (int64_t j = 0; j < task.m; ++j) sum += cost[j];
      task.f[row] = sum;
    }
  }
}

// Counts the slice, when all rows are written.
__global__ void EchoEndKernel(const Task* tasks, int task_count) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= task_count) return;
  const Task& task = tasks[i];
  const int taken = task.first ? 1 : *task.slices + 1;
  *task.slices = taken;
  *task.finished = taken;
  if (taken < task.wanted || task.convergence == nullptr) return;
  for (int64_t k = 0; k < task.count; ++k) {
    Convergence convergence;
    convergence.iterations = taken;
    convergence.converged = true;
    task.convergence[k] = convergence;
  }
}

class EchoResident final : public Resident {
 public:
  EchoResident(const Problem& problem, void* workspace) : problem_(problem), workspace_(workspace) {}
  bool done() const override { return done_; }
  absl::Status status() const override { return status_; }
  SolveReport report() const override {
    SolveReport report;
    report.convergence = progress();
    report.family = "echo";
    return report;
  }
  Convergence progress() const override {
    Convergence convergence;
    convergence.iterations = slices_;
    convergence.converged = done_;
    return convergence;
  }

  Task MakeTask(int* finished_on_device) const {
    Task task{};
    task.cost = static_cast<const float*>(problem_.transport.cost.data);
    task.shared_cost = problem_.transport.cost.shared;
    task.plan = static_cast<float*>(problem_.outputs.plan.data);
    task.f = static_cast<float*>(problem_.outputs.f.data);
    task.convergence = problem_.outputs.convergence;
    task.slices = static_cast<int*>(workspace_);
    task.finished = finished_on_device;
    task.count = problem_.count;
    task.n = problem_.n;
    task.m = problem_.m;
    task.wanted = problem_.solver.max_iterations;
    task.first = slices_ == 0;
    task.trap = problem_.solver.epsilon == kEchoTraps;
    task.wait_ns = static_cast<long long>(problem_.solver.tolerance * 1e9);
    return task;
  }

 private:
  friend class Echo;
  const Problem problem_;
  void* const workspace_;
  const int* finished_ = nullptr;
  bool no_scratch_ = false;
  bool done_ = false;
  int slices_ = 0;
  absl::Status status_;
};

class Echo final : public Family {
 public:
  const char* name() const override { return "echo"; }
  bool Takes(const DeviceInfo&, const Problem& problem) const override { return problem.kind == ProblemKind::kDense; }
  int64_t WorkspaceBytes(const DeviceInfo&, const Problem&) const override { return sizeof(int); }
  double PredictedSeconds(const DeviceInfo&, const Problem&) const override { return 1e-6; }
  bool ReadsInputsOnce(const DeviceInfo&, const Problem& problem) const override {
    return problem.solver.update_rule == UpdateRule::kAlternating;
  }
  std::unique_ptr<Resident> Make(const Problem& problem, void* workspace) const override {
    return std::make_unique<EchoResident>(problem, workspace);
  }

  absl::Status Launch(absl::Span<Resident* const> residents, double, LaunchContext* context) const override {
    std::vector<Task> tasks;
    int64_t elements = 1;
    bool refused = false;
    void* device = nullptr;
    const int* host = static_cast<int*>(context->HostVisible(residents.size() * sizeof(int), &device));
    if (host == nullptr) return absl::InternalError("no pinned memory");
    for (size_t i = 0; i < residents.size(); ++i) {
      auto* resident = static_cast<EchoResident*>(residents[i]);
      resident->finished_ = host + i;
      if (resident->problem_.solver.epsilon == kEchoWantsTheMoon) {
        resident->no_scratch_ = context->Scratch(size_t{1} << 50) == nullptr;
        continue;
      }
      tasks.push_back(resident->MakeTask(static_cast<int*>(device) + i));
      const Problem& problem = resident->problem_;
      refused = refused || problem.solver.epsilon == kEchoIsRefused;
      elements = std::max(elements, problem.count * problem.n * problem.m);
    }
    if (tasks.empty()) return absl::OkStatus();
    auto* uploaded = static_cast<const Task*>(context->Upload(tasks.data(), tasks.size() * sizeof(Task)));
    if (uploaded == nullptr) return absl::InternalError("no pinned memory");
    const int task_count = static_cast<int>(tasks.size());
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>((elements + kThreads - 1) / kThreads, 528)), task_count);
    if (refused) {
      LaunchKernel(EchoKernel, 1, kThreads, kTooMuchShared, context->stream(), uploaded);
      AllowShared(EchoEndKernel, kMuchShared);  // Succeeds, and so makes cudaGetLastError forget.
    }
    KeepLaunchError(LaunchNative(EchoKernel, grid, kThreads, 0, context->stream(), uploaded));
    LaunchKernel(EchoEndKernel, (task_count + kThreads - 1) / kThreads, kThreads, 0, context->stream(), uploaded,
                 task_count);
    const cudaError_t error = TakeLaunchError();
    if (error == cudaSuccess) return absl::OkStatus();
    return absl::InternalError(cudaGetErrorString(error));
  }

  void Collect(absl::Span<Resident* const> residents) const override {
    for (Resident* r : residents) {
      auto* resident = static_cast<EchoResident*>(r);
      resident->slices_ = *resident->finished_;
      resident->done_ = resident->slices_ == resident->problem_.solver.max_iterations;
      if (resident->problem_.solver.epsilon == kEchoDiverges) {
        resident->done_ = true;
        resident->status_.Update(absl::FailedPreconditionError("this problem diverges"));
      }
      if (resident->no_scratch_) {
        resident->done_ = true;
        resident->status_.Update(absl::ResourceExhaustedError("no memory for this problem"));
      }
    }
  }
};

}  // namespace

const Family* EchoFamily() {
  static const Echo kFamily;
  return &kFamily;
}

}  // namespace cuda
}  // namespace sinkhorn
