// Timed transport solves on one GPU, as the backend runs them but with tensors already there: one JSON line for each
// row of the tables, for gpu_transport.py.
//
// A solve is timed by the host's clock from the first launch to the last Collect, preparation and measuring included,
// median of repeats. Before the clock starts its answer is compared with the same iterations in float64 (DOUBLE, which
// the conformance tests hold to the oracle).
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/side_stream.h"
#include "tests/bench/gpu_check.h"

namespace sinkhorn {
namespace {

// Device memory that lives as long as this.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) { Check(cudaMalloc(&data_, std::max<size_t>(bytes, 1)), "cudaMalloc"); }
  explicit DeviceBuffer(const std::vector<float>& values) : DeviceBuffer(values.size() * sizeof(float)) {
    Check(cudaMemcpy(data_, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~DeviceBuffer() { (void)cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// What a slice takes comes from three regions that are rewound after each.
class Context final : public cuda::LaunchContext {
 public:
  explicit Context(const DeviceInfo& device) : device_(device), scratch_(kBytes), uploads_(kBytes) {
    Check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    Check(side_.Init(stream_), "a second stream");
    Check(cudaMallocHost(&visible_, kBytes), "cudaMallocHost");
  }
  ~Context() override {
    (void)cudaStreamDestroy(stream_);
    (void)cudaFreeHost(visible_);
  }
  const DeviceInfo& device() const override { return device_; }
  CUstream_st* stream() const override { return stream_; }
  CUstream_st* side_stream() const override { return side_.get(); }
  void Fork() override { Check(side_.Fork(), "Fork"); }
  void Join() override { Check(side_.Join(), "Join"); }
  // As the backend does.
  const void* Upload(const void* data, size_t bytes) override {
    if (bytes <= cuda::kMappedUploadBytes) {
      char* pinned = static_cast<char*>(visible_) + Take(&seen_, bytes);
      std::memcpy(pinned, data, bytes);
      return pinned;
    }
    void* at = static_cast<char*>(uploads_.data()) + Take(&uploaded_, bytes);
    Check(cudaMemcpyAsync(at, data, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
    return at;
  }
  void* Scratch(size_t bytes) override { return static_cast<char*>(scratch_.data()) + Take(&scratched_, bytes); }
  void* HostVisible(size_t bytes, void** device_address) override {
    char* at = static_cast<char*>(visible_) + Take(&seen_, bytes);
    std::memset(at, 0, bytes);
    *device_address = at;
    return at;
  }
  void Rewind() { uploaded_ = scratched_ = seen_ = 0; }

 private:
  static constexpr size_t kBytes = size_t{16} << 20;
  static size_t Take(size_t* used, size_t bytes) {
    const size_t at = *used;
    *used += (bytes + 255) / 256 * 256;
    if (*used > kBytes) std::abort();
    return at;
  }
  DeviceInfo device_;
  cudaStream_t stream_ = nullptr;
  cuda::SideStream side_;
  DeviceBuffer scratch_, uploads_;
  void* visible_ = nullptr;
  size_t uploaded_ = 0, scratched_ = 0, seen_ = 0;
};

struct Row {
  std::string name;
  bool dense = false;
  int64_t count = 1, n = 0, m = 0, dim = 0;
  double epsilon = 0.1;
  int iterations = 10;
  double tolerance = 0;
  double rho = std::numeric_limits<double>::infinity();
  double decay = 0;
  bool symmetric = false, over_relaxation = true, gradient = false, mixture = false, debias = false;
  Precision precision = Precision::kStrict;
  PointCost cost = PointCost::kSquaredEuclidean;
  bool check = true;
  int repeats = 20;
};

// Uniform or Gaussian numbers of a row, and room for its answers.
struct Inputs {
  explicit Inputs(const Row& row) {
    std::mt19937 random(7);
    const auto fill = [&](int64_t size) {
      std::vector<float> values(size);
      if (row.mixture) {
        std::normal_distribution<float> normal(0, 0.25f);
        for (int64_t i = 0; i < size; ++i) values[i] = normal(random) + (i / row.dim % 2 == 0 ? 0.15f : -0.15f);
      } else {
        std::uniform_real_distribution<float> uniform(0, 1);
        for (float& value : values) value = uniform(random);
      }
      return values;
    };
    if (row.dense) {
      cost = std::make_unique<DeviceBuffer>(fill(row.count * row.n * row.m));
    } else {
      x = std::make_unique<DeviceBuffer>(fill(row.count * row.n * row.dim));
      y = std::make_unique<DeviceBuffer>(fill(row.count * row.m * row.dim));
    }
  }
  std::unique_ptr<DeviceBuffer> cost, x, y;
};

struct Answer {
  Answer(const Row& row)
      : f(row.count * row.n * sizeof(double)),
        g(row.count * row.m * sizeof(double)),
        gradient_x(row.gradient ? row.count * row.n * row.dim * sizeof(float) : 0),
        gradient_y(row.gradient ? row.count * row.m * row.dim * sizeof(float) : 0),
        f_aa(row.debias ? row.count * row.n * sizeof(double) : 0),
        g_bb(row.debias ? row.count * row.m * sizeof(double) : 0),
        value(row.count * sizeof(double)) {}
  DeviceBuffer f, g, gradient_x, gradient_y, f_aa, g_bb, value;
  Convergence convergence;
};

Problem ProblemOf(const Row& row, const Inputs& in, const Answer& answer, Precision precision) {
  Problem p;
  p.kind = row.dense ? ProblemKind::kDense : ProblemKind::kPointCloud;
  p.count = row.count;
  p.n = row.n;
  p.m = row.m;
  p.dim = row.dim;
  if (row.dense) p.transport.cost.data = in.cost->data();
  if (!row.dense) p.transport.x.data = in.x->data();
  if (!row.dense) p.transport.y.data = in.y->data();
  p.transport.point_cost = row.cost;
  p.solver.epsilon = row.epsilon;
  p.solver.max_iterations = row.iterations;
  p.solver.tolerance = row.tolerance;
  p.solver.rho_a = p.solver.rho_b = row.rho;
  p.solver.over_relaxation = row.over_relaxation;
  p.solver.precision = precision;
  p.solver.debias = row.debias;
  p.solver.epsilon_decay = row.decay;
  if (row.symmetric) p.solver.update_rule = UpdateRule::kSymmetric;
  p.outputs.value = static_cast<double*>(answer.value.data());
  p.outputs.f = {DType::kFloat64, answer.f.data()};
  p.outputs.g = {DType::kFloat64, answer.g.data()};
  if (row.debias) p.outputs.f_aa = {DType::kFloat64, answer.f_aa.data()};
  if (row.debias) p.outputs.g_bb = {DType::kFloat64, answer.g_bb.data()};
  if (row.gradient) p.outputs.gradient_x = {DType::kFloat32, answer.gradient_x.data()};
  if (row.gradient) p.outputs.gradient_y = {DType::kFloat32, answer.gradient_y.data()};
  return p;
}

// Solves all problems together; returns seconds.
double Solve(const std::vector<Problem>& problems, const std::vector<std::unique_ptr<DeviceBuffer>>& workspaces,
             Context* context, Convergence* convergence) {
  const cuda::Family* family = cuda::Transport();
  std::vector<std::unique_ptr<cuda::Resident>> residents;
  for (size_t k = 0; k < problems.size(); ++k) residents.push_back(family->Make(problems[k], workspaces[k]->data()));
  Check(cudaDeviceSynchronize(), "before");
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    std::vector<cuda::Resident*> running;
    for (const auto& resident : residents) {
      if (!resident->done()) running.push_back(resident.get());
    }
    if (running.empty()) break;
    const absl::Status status = family->Launch(absl::MakeConstSpan(running), 0.05, context);
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str()), std::exit(1);
    Check(cudaStreamSynchronize(context->stream()), "slice");
    family->Collect(absl::MakeConstSpan(running));
    context->Rewind();
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!residents[0]->status().ok()) std::fprintf(stderr, "%s\n", residents[0]->status().ToString().c_str());
  if (convergence != nullptr) *convergence = residents[0]->report().convergence;
  return seconds;
}

std::vector<std::unique_ptr<DeviceBuffer>> WorkspacesOf(const std::vector<Problem>& problems,
                                                        const DeviceInfo& device) {
  std::vector<std::unique_ptr<DeviceBuffer>> workspaces;
  for (const Problem& p : problems) {
    workspaces.push_back(std::make_unique<DeviceBuffer>(cuda::Transport()->WorkspaceBytes(device, p)));
  }
  return workspaces;
}

std::vector<double> Read(const DeviceBuffer& buffer, size_t count) {
  std::vector<double> values(count);
  Check(cudaMemcpy(values.data(), buffer.data(), count * sizeof(double), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return values;
}

// Largest difference of potentials, those of the self-terms too, in epsilons.
double Difference(const Row& row, const Answer& p, const Answer& q) {
  double worst = 0;
  const int64_t n = row.debias ? row.n : 0, m = row.debias ? row.m : 0;
  for (const auto& [a, b, size] : {std::make_tuple(&p.f, &q.f, row.n), std::make_tuple(&p.g, &q.g, row.m),
                                   std::make_tuple(&p.f_aa, &q.f_aa, n), std::make_tuple(&p.g_bb, &q.g_bb, m)}) {
    const std::vector<double> u = Read(*a, row.count * size), v = Read(*b, row.count * size);
    for (size_t k = 0; k < u.size(); ++k) {
      const double difference = std::abs(u[k] - v[k]);
      worst = difference <= worst ? worst : std::isfinite(difference) ? difference : INFINITY;
    }
  }
  return worst / row.epsilon;
}

// Largest difference of a gradient, in units of its largest entry.
double GradientDifference(const Row& row, const Answer& p, const Answer& q) {
  double worst = 0;
  for (const auto& [a, b, size] :
       {std::make_tuple(&p.gradient_x, &q.gradient_x, row.n), std::make_tuple(&p.gradient_y, &q.gradient_y, row.m)}) {
    const size_t count = row.count * size * row.dim;
    std::vector<float> u(count), v(count);
    Check(cudaMemcpy(u.data(), a->data(), count * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
    Check(cudaMemcpy(v.data(), b->data(), count * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
    double difference = 0, largest = 0;
    for (size_t k = 0; k < count; ++k) {
      const double d = std::abs(u[k] - v[k]);
      difference = d <= difference ? difference : std::isfinite(d) ? d : INFINITY;
      largest = std::max<double>(largest, std::abs(v[k]));
    }
    worst = std::max(worst, difference / largest);
  }
  return worst;
}

void Measure(const Row& row, const DeviceInfo& device, Context* context) {
  const Inputs inputs(row);
  const Answer answer(row);
  double error = -1, gradient_error = -1;
  if (row.check) {
    const Answer exact(row);
    const std::vector<Problem> reference = {ProblemOf(row, inputs, exact, Precision::kDouble)};
    const std::vector<Problem> ours = {ProblemOf(row, inputs, answer, row.precision)};
    Solve(reference, WorkspacesOf(reference, device), context, nullptr);
    Solve(ours, WorkspacesOf(ours, device), context, nullptr);
    error = Difference(row, answer, exact);
    if (row.gradient) gradient_error = GradientDifference(row, answer, exact);
  }
  const std::vector<Problem> problems = {ProblemOf(row, inputs, answer, row.precision)};
  const auto workspaces = WorkspacesOf(problems, device);
  std::vector<double> seconds;
  Convergence convergence;
  const int warm = row.repeats > 1 ? 2 : 0;
  for (int k = 0; k < row.repeats + warm; ++k) {
    const double s = Solve(problems, workspaces, context, &convergence);
    if (k >= warm) seconds.push_back(s);
  }
  std::sort(seconds.begin(), seconds.end());
  std::printf(
      "{\"name\": \"%s\", \"dense\": %d, \"cost\": %d, \"count\": %ld, \"n\": %ld, \"m\": %ld, \"dim\": %ld, "
      "\"epsilon\": %g, "
      "\"precision\": \"%s\", \"median_ms\": %.4f, \"min_ms\": %.4f, \"error_eps\": %.3g, \"iterations\": %d, "
      "\"gradient_error\": %.3g, \"error_a\": %.3g, \"error_b\": %.3g, \"workspace_mb\": %.1f}\n",
      row.name.c_str(), row.dense, static_cast<int>(row.cost), row.count, row.n, row.m, row.dim, row.epsilon,
      row.precision == Precision::kFast ? "FAST" : "STRICT", seconds[seconds.size() / 2] * 1e3, seconds[0] * 1e3, error,
      convergence.iterations, gradient_error, convergence.marginal_error_a, convergence.marginal_error_b,
      cuda::Transport()->WorkspaceBytes(device, problems[0]) / 1e6);
  std::fflush(stdout);
}

// 1,024 clouds of 16..1,024 points in one batch, against the same work in uniform batches of 512 points. Every
// kChecked-th answer is compared with float64.
void MeasureRagged(int64_t dim, const DeviceInfo& device, Context* context) {
  std::mt19937 random(11);
  std::uniform_int_distribution<int> points(16, 1024);
  constexpr int kChecked = 16;
  double seconds[2], pairs[2] = {0, 0}, error = 0;
  for (int ragged = 0; ragged < 2; ++ragged) {
    std::vector<Row> rows;
    std::vector<std::unique_ptr<Inputs>> inputs;
    std::vector<std::unique_ptr<Answer>> answers;
    std::vector<Problem> problems;
    for (int k = 0; k < 1024; ++k) {
      Row row;
      row.n = ragged ? points(random) : 512;
      row.m = ragged ? points(random) : 512;
      row.dim = dim;
      row.iterations = 50;
      rows.push_back(row);
      pairs[ragged] += 1.0 * row.n * row.m;
      inputs.push_back(std::make_unique<Inputs>(row));
      answers.push_back(std::make_unique<Answer>(row));
      problems.push_back(ProblemOf(row, *inputs.back(), *answers.back(), Precision::kStrict));
    }
    const auto workspaces = WorkspacesOf(problems, device);
    seconds[ragged] = 1e9;
    for (int k = 0; k < 3; ++k)
      seconds[ragged] = std::min(seconds[ragged], Solve(problems, workspaces, context, nullptr));
    for (size_t k = 0; k < rows.size(); k += kChecked) {
      const Answer exact(rows[k]);
      const std::vector<Problem> reference = {ProblemOf(rows[k], *inputs[k], exact, Precision::kDouble)};
      Solve(reference, WorkspacesOf(reference, device), context, nullptr);
      error = std::max(error, Difference(rows[k], *answers[k], exact));
    }
  }
  std::printf(
      "{\"name\": \"ragged\", \"dim\": %ld, \"uniform_ms\": %.3f, \"ragged_ms\": %.3f, \"share\": %.3f, "
      "\"error_eps\": %.3g}\n",
      dim, seconds[0] * 1e3, seconds[1] * 1e3, seconds[1] / pairs[1] / (seconds[0] / pairs[0]), error);
  std::fflush(stdout);
}

// All rows, or those of a name: "batch"; of them those of a size and dimension: "batch/512/64".
std::vector<Row> Rows(const std::string& argument) {
  const size_t slash = argument.find('/');
  const std::string chosen = argument.substr(0, slash);
  long n = 0, dim = 0;
  if (slash != std::string::npos) (void)std::sscanf(argument.c_str() + slash, "/%ld/%ld", &n, &dim);
  std::vector<Row> rows;
  const auto add = [&](const char* name, std::function<void(Row*)> set) {
    Row row;
    row.name = name;
    set(&row);
    const bool fits = (n == 0 || row.n == n) && (dim == 0 || row.dim == dim);
    if ((chosen.empty() || chosen == row.name) && fits) rows.push_back(row);
  };
  // Issue 4, shows 3.
  add("dense 128", [](Row* r) { r->dense = true, r->count = 1024, r->n = r->m = 128, r->iterations = 50; });
  add("dense 512", [](Row* r) { r->dense = true, r->count = 64, r->n = r->m = 512, r->iterations = 50; });
  add("dense 16384",
      [](Row* r) { r->dense = true, r->n = r->m = 16384, r->iterations = 10, r->repeats = 3, r->check = false; });
  // Issue 5, shows 2.
  const int64_t sizes[][2] = {{1024, 64},   {4096, 64},   {10000, 64}, {50000, 64}, {10000, 3},
                              {10000, 128}, {10000, 512}, {4096, 784}, {1000, 64}};
  for (const auto& [n, dim] : sizes) {
    for (Precision precision : {Precision::kStrict, Precision::kFast}) {
      add("cloud", [&](Row* r) {
        r->n = r->m = n, r->dim = dim, r->precision = precision, r->check = n <= 10000;
        r->repeats = n > 10000 ? 3 : 10;
      });
    }
    add("cloud gradient", [&](Row* r) {
      r->n = r->m = n, r->dim = dim, r->gradient = true, r->check = n <= 4096 && dim <= 128;
      r->repeats = n > 10000 ? 2 : 5;
    });
    add("cloud symmetric", [&](Row* r) {
      r->n = r->m = n, r->dim = dim, r->symmetric = true, r->check = n <= 4096, r->repeats = n > 10000 ? 2 : 5;
    });
  }
  // Sizes between those that a cluster solves and those that are swept.
  for (int64_t n : {1100, 2048, 2800, 4096}) {
    for (int64_t dim : {64, 3}) {
      if (dim == 3 && n % 2048 != 0) continue;
      for (int64_t count : {1, 16}) {
        for (Precision precision : {Precision::kStrict, Precision::kFast}) {
          add("middle", [&](Row* r) {
            r->count = count, r->n = r->m = n, r->dim = dim, r->precision = precision;
            r->iterations = 50, r->repeats = 10;
          });
        }
      }
    }
    add("middle dense", [&](Row* r) { r->dense = true, r->n = n, r->m = 2048, r->iterations = 50, r->repeats = 10; });
  }
  for (int64_t n : {1000, 4096, 10000}) {
    add("relaxed", [&](Row* r) { r->n = r->m = n, r->dim = 64, r->rho = 1, r->repeats = 10; });
  }
  for (const auto& [n, dim] : {std::make_pair(1000, 3), std::make_pair(4096, 3), std::make_pair(4096, 64)}) {
    add("small epsilon", [&](Row* r) {
      r->n = r->m = n, r->dim = dim, r->epsilon = dim == 3 ? 1e-3 : 1e-2, r->iterations = 100, r->repeats = 5;
    });
  }
  // Shows 3.
  const int64_t batches[][3] = {{256, 64, 64}, {256, 128, 64}, {256, 256, 64}, {64, 512, 64}, {1024, 64, 3}};
  for (const auto& [count, n, dim] : batches) {
    add("batch", [&](Row* r) { r->count = count, r->n = r->m = n, r->dim = dim, r->iterations = 50; });
  }
  const int64_t debiased[][3] = {{1, 1024, 64}, {1, 4096, 64}, {1, 10000, 64}, {1, 4096, 3},
                                 {256, 64, 64}, {64, 512, 64}, {64, 1000, 3}};
  for (const auto& [count, n, dim] : debiased) {
    for (double epsilon : {0.1, 0.0025}) {
      if (epsilon < 0.1 && (dim != 3 || count != 1)) continue;
      add("debiased", [&](Row* r) {
        r->count = count, r->n = r->m = n, r->dim = dim, r->iterations = 50, r->debias = true, r->epsilon = epsilon;
        r->check = n <= 4096, r->repeats = count == 1 ? 5 : 10;
      });
    }
  }
  add("debiased", [](Row* r) {
    r->count = 64, r->n = r->m = 500, r->dim = 3, r->iterations = 1000, r->tolerance = 1e-4, r->debias = true;
    r->epsilon = 0.05, r->check = false;
  });
  // Divergences as they are trained with: epsilon annealed from the clouds' extent to .05^2, all updates symmetric.
  for (int64_t n : {1000, 4096, 10000}) {
    add("annealed", [&](Row* r) {
      r->n = r->m = n, r->dim = 3, r->iterations = 12, r->debias = r->symmetric = r->gradient = true, r->decay = 0.25;
      r->epsilon = 0.0025, r->check = n <= 4096, r->repeats = 5;
    });
  }
  // Shows 4.
  for (int64_t n : {1000, 10000}) {
    for (double epsilon : {1e-2, 1e-3}) {
      for (bool relaxed : {false, true}) {
        if (n > 1000 && (epsilon < 1e-2 || !relaxed)) continue;  // Minutes.
        add(relaxed ? "to 1e-6" : "to 1e-6 plain", [&](Row* r) {
          r->n = r->m = n, r->dim = 2, r->epsilon = epsilon, r->iterations = 20000, r->tolerance = 1e-6;
          r->over_relaxation = relaxed, r->check = false, r->repeats = n == 1000 ? 5 : 1;
        });
      }
    }
    for (int64_t count : {1, 64}) {
      if (n > 1000 && count > 1) continue;
      add("to 1e-6", [&](Row* r) {
        r->count = count, r->n = r->m = n, r->dim = 64, r->iterations = 20000, r->tolerance = 1e-6;
        r->check = false, r->repeats = n == 1000 ? 5 : 2;
      });
    }
    for (bool relaxed : {false, true}) {
      add(relaxed ? "mixtures to 1e-6" : "mixtures to 1e-6 plain", [&](Row* r) {
        r->n = r->m = n, r->dim = 64, r->epsilon = 1, r->iterations = 2000, r->tolerance = 1e-6;
        r->over_relaxation = relaxed, r->mixture = true, r->check = false, r->repeats = n == 1000 ? 5 : 1;
      });
    }
  }
  // Every cost of points, when asked for.
  constexpr PointCost kCosts[] = {PointCost::kSquaredEuclidean, PointCost::kEuclidean, PointCost::kCosine,
                                  PointCost::kNegativeDot};
  if (chosen == "costs") {
    const int64_t shapes[][3] = {{1, 10000, 64}, {1, 10000, 3}, {256, 64, 64}, {256, 256, 64}, {64, 512, 3}};
    for (const auto& [count, n, dim] : shapes) {
      for (PointCost cost : kCosts) {
        for (bool gradient : {false, true}) {
          add("costs", [&](Row* r) {
            r->count = count, r->n = r->m = n, r->dim = dim, r->cost = cost, r->gradient = gradient, r->repeats = 5;
            r->iterations = n == 10000 ? 10 : 50;
          });
        }
      }
    }
  }
  // Every shape of kernel against float64, when asked for.
  if (chosen == "checks") {
    for (int64_t dim : {1, 3, 16, 17, 32, 33, 64, 65, 100, 128, 200, 512, 784, 1024}) {
      for (Precision precision : {Precision::kStrict, Precision::kFast}) {
        add("checks", [&](Row* r) {
          r->n = 700, r->m = 901, r->dim = dim, r->precision = precision, r->repeats = 1, r->epsilon = 0.01 * dim;
          r->gradient = true;
        });
      }
    }
    // Exponents that are kept; of a small epsilon, whose sums leave the safe range.
    const int64_t kept[][3] = {{1100, 2050, 20},  {2100, 4100, 64},  {1100, 2050, 784},
                               {2100, 4100, 200}, {1030, 8200, 128}, {1100, 14400, 100}};
    for (const auto& [n, m, dim] : kept) {
      for (Precision precision : {Precision::kStrict, Precision::kFast}) {
        for (double epsilon : {0.01, 0.001, 0.0003}) {
          for (double tolerance : {0.0, 1e-3}) {
            add("checks", [&](Row* r) {
              r->n = n, r->m = m, r->dim = dim, r->precision = precision, r->repeats = 1;
              r->epsilon = epsilon * dim, r->tolerance = tolerance, r->iterations = tolerance > 0 ? 300 : 20;
              r->gradient = tolerance == 0;
            });
          }
        }
      }
    }
    // Symmetric updates and self-terms from such exponents, and from frames.
    const int64_t swept[][3] = {
        {1100, 2050, 20}, {2100, 4100, 64}, {1100, 1200, 784}, {1030, 8200, 128}, {1100, 1200, 3}};
    for (const auto& [n, m, dim] : swept) {
      for (Precision precision : {Precision::kStrict, Precision::kFast}) {
        for (double epsilon : {0.01, 0.001}) {
          for (double tolerance : {0.0, 1e-3}) {
            for (bool debias : {false, true}) {
              add("checks", [&](Row* r) {
                r->n = n, r->m = m, r->dim = dim, r->precision = precision, r->repeats = 1;
                r->epsilon = epsilon * dim, r->tolerance = tolerance, r->iterations = tolerance > 0 ? 300 : 20;
                r->symmetric = !debias, r->debias = debias, r->gradient = tolerance == 0;
              });
            }
          }
        }
      }
    }
    // More than one chunk of densities: of exponents that are not kept.
    for (int64_t dim : {200, 300}) {
      add("checks", [&](Row* r) {
        r->n = 1500, r->m = 1290, r->dim = dim, r->repeats = 1, r->epsilon = 0.01 * dim, r->gradient = true;
        r->iterations = 3;
      });
    }
    const int64_t shapes[][3] = {{3, 64, 50},      {3, 65, 128},    {3, 129, 250},  {3, 300, 257},
                                 {3, 17, 500},     {3, 512, 511},   {2, 513, 300},  {1, 2048, 4096},
                                 {1, 4000, 16384}, {1, 3000, 1000}, {2, 1500, 2052}};
    for (const auto& [count, n, m] : shapes) {
      for (bool dense : {false, true}) {
        if (!dense && n * m > 1 << 20) continue;
        for (double tolerance : {0.0, 1e-4}) {
          add("checks", [&](Row* r) {
            r->count = count, r->n = n, r->m = m, r->dim = 5, r->dense = dense, r->tolerance = tolerance;
            r->iterations = tolerance > 0 ? 300 : 20, r->repeats = 1;
          });
        }
      }
    }
  }
  // Little of every kernel, for a sanitizer.
  if (chosen == "tiny") {
    for (int64_t dim : {3, 20, 64, 100, 200}) {
      for (Precision precision : {Precision::kStrict, Precision::kFast}) {
        add("tiny",
            [&](Row* r) { r->n = 600, r->m = 520, r->dim = dim, r->precision = precision, r->gradient = true; });
      }
    }
    for (PointCost cost : kCosts) {
      for (const auto& [n, m] : {std::make_pair(40, 60), std::make_pair(600, 520), std::make_pair(1030, 60)}) {
        add("tiny", [&](Row* r) { r->n = n, r->m = m, r->dim = 5, r->gradient = true, r->cost = cost; });
      }
    }
    for (const auto& [n, m] : {std::make_pair(50, 60), std::make_pair(100, 60), std::make_pair(250, 600)}) {
      for (double tolerance : {0.0, 1e-2}) {
        add("tiny", [&](Row* r) { r->n = n, r->m = m, r->dim = 7, r->tolerance = tolerance, r->debias = true; });
      }
      add("tiny", [&](Row* r) { r->n = n, r->m = m, r->dim = 7, r->symmetric = true; });
    }
    add("tiny", [](Row* r) { r->n = 100, r->m = 120, r->dim = 5, r->tolerance = 1e-3; });
    add("tiny", [](Row* r) { r->n = 530, r->m = 520, r->dim = 2, r->tolerance = 1e-3; });
    // Exponents in float64, on the chip.
    const int64_t exact[][2] = {{60, 41}, {120, 128}, {250, 199}, {400, 512}, {700, 530}};
    for (const auto& [n, m] : exact) {
      for (bool dense : {false, true}) {
        add("tiny", [&](Row* r) { r->n = n, r->m = m, r->dim = 6, r->dense = dense, r->epsilon = 1e-3; });
      }
    }
    // And in memory, in frames.
    for (PointCost cost : kCosts) {
      add("tiny", [&](Row* r) { r->n = 1030, r->m = 1100, r->dim = 3, r->cost = cost, r->epsilon = 1e-3; });
    }
    add("tiny", [](Row* r) { r->dense = true, r->n = 1030, r->m = 1101, r->epsilon = 1e-3; });
    for (int64_t n : {60, 120, 250, 400, 2048}) {
      add("tiny", [&](Row* r) { r->dense = true, r->n = n, r->m = n == 2048 ? 1024 : n; });
    }
    // More than the device has at once, one after the other in the same blocks.
    for (bool dense : {false, true}) {
      add("tiny", [&](Row* r) { r->count = 9, r->n = 610, r->m = 520, r->dim = 5, r->dense = dense; });
    }
    for (Row& row : rows) row.iterations = row.n == 1030 ? 6 : 3, row.check = false, row.repeats = 1;
    // Exponents that are kept.
    for (const auto& [m, dim] : {std::make_pair(1100, 20), std::make_pair(1100, 300), std::make_pair(8200, 100)}) {
      for (Precision precision : {Precision::kStrict, Precision::kFast}) {
        add("tiny", [&](Row* r) {
          r->n = 1030, r->m = m, r->dim = dim, r->precision = precision;
          r->iterations = 4, r->check = false, r->repeats = 1, r->gradient = true;
        });
        if (m > 1100) continue;
        for (bool debias : {false, true}) {
          add("tiny", [&](Row* r) {
            r->n = 1030, r->m = m, r->dim = dim, r->precision = precision, r->symmetric = !debias, r->debias = debias;
            r->iterations = 5, r->check = false, r->repeats = 1, r->gradient = true, r->epsilon = 0.005 * dim;
          });
        }
      }
    }
  }
  // Shows 5.
  add("million",
      [](Row* r) { r->n = r->m = 1000000, r->dim = 64, r->iterations = 1, r->check = false, r->repeats = 1; });
  return rows;
}

int Main(int argc, char** argv) {
  const absl::StatusOr<std::vector<DeviceInfo>> devices = ListDevices();
  if (!devices.ok() || devices->empty()) {
    std::printf("no GPU\n");
    return 0;
  }
  Check(cudaSetDevice(0), "cudaSetDevice");
  Context context((*devices)[0]);
  for (int k = 1; k < argc || k == 1; ++k) {
    const std::string chosen = k < argc ? argv[k] : "";
    for (const Row& row : Rows(chosen)) Measure(row, (*devices)[0], &context);
    if (chosen.empty() || chosen == "ragged") {
      for (int64_t dim : {3, 64}) MeasureRagged(dim, (*devices)[0], &context);
    }
  }
  return 0;
}

}  // namespace
}  // namespace sinkhorn

int main(int argc, char** argv) { return sinkhorn::Main(argc, argv); }
