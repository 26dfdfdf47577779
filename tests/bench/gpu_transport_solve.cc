#include "tests/bench/gpu_transport_solve.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <tuple>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace sinkhorn {
namespace {

std::vector<double> Read(const DeviceBuffer& buffer, size_t count) {
  std::vector<double> values(count);
  Check(cudaMemcpy(values.data(), buffer.data(), count * sizeof(double), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return values;
}

}  // namespace

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
  p.transport.kappa = row.kappa;
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

}  // namespace sinkhorn
