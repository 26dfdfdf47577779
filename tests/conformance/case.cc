#include "tests/conformance/case.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "gtest/gtest.h"

namespace sinkhorn::conformance {
namespace {

// No case takes this long; a backend that makes no progress is a failure, not a hang.
constexpr std::chrono::seconds kPatience(100);

// Inputs of a case and outputs of an answer that are tensors, in one order.
constexpr Tensor Case::*kInputs[] = {&Case::logits,
                                     &Case::row_marginals,
                                     &Case::column_marginals,
                                     &Case::dustbin_score,
                                     &Case::cotangent,
                                     &Case::plan,
                                     &Case::cost,
                                     &Case::x,
                                     &Case::y,
                                     &Case::a,
                                     &Case::b,
                                     &Case::initial_f,
                                     &Case::initial_g,
                                     &Case::v,
                                     &Case::u,
                                     &Case::direction_x,
                                     &Case::direction_y};

struct NamedOutput {
  const char* name;
  Tensor Answer::*tensor;
  OutputView Outputs::*view;
};
constexpr NamedOutput kOutputs[] = {
    {"f", &Answer::f, &Outputs::f},
    {"g", &Answer::g, &Outputs::g},
    {"f_aa", &Answer::f_aa, &Outputs::f_aa},
    {"g_bb", &Answer::g_bb, &Outputs::g_bb},
    {"plan", &Answer::plan, &Outputs::plan},
    {"row_sums", &Answer::row_sums, &Outputs::row_sums},
    {"column_sums", &Answer::column_sums, &Outputs::column_sums},
    {"gradient_logits", &Answer::gradient_logits, &Outputs::gradient_logits},
    {"gradient_dustbin_score", &Answer::gradient_dustbin_score, &Outputs::gradient_dustbin_score},
    {"gradient_x", &Answer::gradient_x, &Outputs::gradient_x},
    {"gradient_y", &Answer::gradient_y, &Outputs::gradient_y},
    {"gradient_a", &Answer::gradient_a, &Outputs::gradient_a},
    {"gradient_b", &Answer::gradient_b, &Outputs::gradient_b},
    {"gradient_cost", &Answer::gradient_cost, &Outputs::gradient_cost},
    {"plan_v", &Answer::plan_v, &Outputs::plan_v},
    {"plan_transpose_u", &Answer::plan_transpose_u, &Outputs::plan_transpose_u},
    {"projection_x", &Answer::projection_x, &Outputs::projection_x},
    {"projection_y", &Answer::projection_y, &Outputs::projection_y},
    {"hessian_x", &Answer::hessian_x, &Outputs::hessian_x},
    {"hessian_y", &Answer::hessian_y, &Outputs::hessian_y},
};

struct NamedScalar {
  const char* name;
  Vector Answer::*values;
  double* Outputs::*view;
};
constexpr NamedScalar kScalars[] = {
    {"value", &Answer::value, &Outputs::value},
    {"value_linear", &Answer::value_linear, &Outputs::value_linear},
    {"dual_bound", &Answer::dual_bound, &Outputs::dual_bound},
    {"primal_bound", &Answer::primal_bound, &Outputs::primal_bound},
};

// The case's problem with views of the case's memory.
Problem ProblemOf(const Case& c) {
  Problem problem = c.problem;
  NormalizationInputs& scaling = problem.normalization;
  scaling.logits = c.logits.view();
  scaling.row_marginals = c.row_marginals.view();
  scaling.column_marginals = c.column_marginals.view();
  scaling.dustbin_score = c.dustbin_score.view();
  scaling.cotangent = c.cotangent.view();
  scaling.plan = c.plan.view();
  TransportInputs& transport = problem.transport;
  transport.cost = c.cost.view();
  transport.x = c.x.view();
  transport.y = c.y.view();
  transport.a = c.a.view();
  transport.b = c.b.view();
  transport.initial_f = c.initial_f.view();
  transport.initial_g = c.initial_g.view();
  transport.v = c.v.view();
  transport.u = c.u.view();
  transport.hessian.x = c.direction_x.view();
  transport.hessian.y = c.direction_y.view();
  return problem;
}

void MakeNormalizationRoom(const Case& c, Answer* answer) {
  const Problem& p = c.problem;
  const int64_t bin = c.dustbin_score.present() ? 1 : 0;
  const int64_t n = p.n + bin, m = p.m + bin;
  const auto room = [&](int64_t size) { return Tensor::Unwritten(p.count * size, c.output_dtype); };
  if (c.wanted & kPlan) answer->plan = room(n * m);
  if (c.wanted & kSums) answer->row_sums = room(n), answer->column_sums = room(m);
  if (!c.cotangent.present()) return;
  answer->gradient_logits = room(p.n * p.m);
  if (bin) answer->gradient_dustbin_score = room(1);
}

void MakeTransportRoom(const Case& c, Answer* answer) {
  const Problem& p = c.problem;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto room = [&](int64_t size) { return Tensor::Unwritten(p.count * size, c.output_dtype); };
  answer->value.assign(p.count, nan);
  answer->dual_bound.assign(p.count, nan);
  if (c.wanted & kValueLinear) answer->value_linear.assign(p.count, nan);
  if (c.wanted & kPrimalBound) answer->primal_bound.assign(p.count, nan);
  if (c.wanted & kPotentials) answer->f = room(p.n), answer->g = room(p.m);
  if (c.wanted & kPotentials && p.solver.debias) answer->f_aa = room(p.n), answer->g_bb = room(p.m);
  if (c.wanted & kPlan) answer->plan = room(p.n * p.m);
  if (c.wanted & kSums) answer->row_sums = room(p.n), answer->column_sums = room(p.m);
  if (c.wanted & kGradientPoints) {
    answer->gradient_x = room(p.n * p.dim);
    answer->gradient_y = room(p.m * p.dim);
  }
  if (c.wanted & kGradientMasses) answer->gradient_a = room(p.n), answer->gradient_b = room(p.m);
  if (c.wanted & kGradientCost) answer->gradient_cost = room(p.n * p.m);
  if (c.wanted & kProducts && c.v.present()) answer->plan_v = room(p.n * p.transport.v_columns);
  if (c.wanted & kProducts && c.u.present()) {
    answer->plan_transpose_u = room(p.m * p.transport.u_columns);
  }
  if (const int64_t directions = p.transport.hessian.count; directions > 0) {
    answer->hessian_x = room(directions * p.n * p.dim);
    answer->hessian_y = room(directions * p.m * p.dim);
    answer->hessian_convergence.resize(p.count);
  }
  if (const int64_t entries = p.outputs.sparse_plan.max_entries; entries > 0) {
    answer->sparse_offsets.assign(p.count * (p.n + 1), -1);
    answer->sparse_columns.assign(p.count * entries, -1);
    answer->sparse_values = room(entries);
    answer->sparse_mass.assign(p.count, nan);
  }
  if (c.wanted & kProjections) {
    answer->projection_x = room(p.n * p.dim);
    answer->projection_y = room(p.m * p.dim);
  }
}

// Points the problem's outputs at the answer's memory.
void BindOutputs(Answer* answer, Problem* problem) {
  for (const NamedOutput& output : kOutputs) {
    problem->outputs.*output.view = (answer->*output.tensor).output();
  }
  for (const NamedScalar& scalar : kScalars) {
    Vector& values = answer->*scalar.values;
    problem->outputs.*scalar.view = values.empty() ? nullptr : values.data();
  }
  problem->outputs.convergence = answer->convergence.data();
  if (!answer->hessian_convergence.empty()) {
    problem->outputs.hessian_convergence = answer->hessian_convergence.data();
  }
  if (answer->sparse_offsets.empty()) return;
  SparseOutput* sparse = &problem->outputs.sparse_plan;
  sparse->row_offsets = answer->sparse_offsets.data();
  sparse->columns = answer->sparse_columns.data();
  sparse->values = answer->sparse_values.output();
  sparse->mass = answer->sparse_mass.data();
}

// Advances until all are done, or patience ends.
void AdvanceAll(Backend* backend, const std::vector<std::unique_ptr<Solve>>& solves, double slice_seconds,
                const std::function<void(Solve*)>& after_slice, int lane) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    std::vector<Solve*> running;
    for (const auto& solve : solves) {
      if (solve && !solve->done()) running.push_back(solve.get());
    }
    if (running.empty()) return;
    const absl::Status status = backend->Advance(lane, absl::MakeConstSpan(running), slice_seconds);
    ASSERT_TRUE(status.ok()) << status;
    for (Solve* solve : running) {
      if (after_slice) after_slice(solve);
    }
    ASSERT_LT(std::chrono::steady_clock::now() - start, kPatience) << "no end in sight";
  }
}

bool SameBits(const Vector& p, const Vector& q) {
  return p.size() == q.size() && (p.empty() || std::memcmp(p.data(), q.data(), p.size() * sizeof(double)) == 0);
}

bool SameBits(const Convergence& p, const Convergence& q) {
  return p.iterations == q.iterations && p.converged == q.converged && p.stop_reason == q.stop_reason &&
         SameBits(Vector{p.marginal_error_a, p.marginal_error_b}, Vector{q.marginal_error_a, q.marginal_error_b});
}

}  // namespace

std::vector<Answer> SolveTogether(Backend* backend, const std::vector<const Case*>& cases, double slice_seconds,
                                  const std::function<void(Solve*)>& after_slice, int lane) {
  std::vector<Answer> answers(cases.size());
  std::vector<std::unique_ptr<Solve>> solves(cases.size());
  for (size_t k = 0; k < cases.size(); ++k) {
    const Case& c = *cases[k];
    Problem problem = ProblemOf(c);
    answers[k].convergence.resize(problem.count);
    if (problem.kind == ProblemKind::kNormalization) {
      MakeNormalizationRoom(c, &answers[k]);
    } else {
      MakeTransportRoom(c, &answers[k]);
    }
    BindOutputs(&answers[k], &problem);
    auto solve = backend->Admit(problem);
    answers[k].status = solve.status();
    if (solve.ok()) solves[k] = *std::move(solve);
  }
  AdvanceAll(backend, solves, slice_seconds, after_slice, lane);
  for (size_t k = 0; k < cases.size(); ++k) {
    if (!solves[k]) continue;
    if (!solves[k]->done()) {
      answers[k].status = absl::DeadlineExceededError("not done");
      continue;
    }
    answers[k].status = solves[k]->status();
    if (answers[k].status.ok()) answers[k].report = solves[k]->report();
  }
  return answers;
}

Answer SolveAlone(Backend* backend, const Case& the_case) {
  Answer answer = std::move(SolveTogether(backend, {&the_case})[0]);
  EXPECT_TRUE(answer.status.ok()) << the_case.name << ": " << answer.status;
  return answer;
}

std::string DifferenceInBits(const Answer& p, const Answer& q) {
  if (p.status != q.status) return "status";
  for (const NamedOutput& output : kOutputs) {
    if (!(p.*output.tensor == q.*output.tensor)) return output.name;
  }
  for (const NamedScalar& scalar : kScalars) {
    if (!SameBits(p.*scalar.values, q.*scalar.values)) return scalar.name;
  }
  if (p.sparse_offsets != q.sparse_offsets || p.sparse_columns != q.sparse_columns ||
      !(p.sparse_values == q.sparse_values) || !SameBits(p.sparse_mass, q.sparse_mass)) {
    return "sparse_plan";
  }
  if (p.convergence.size() != q.convergence.size()) return "convergence";
  for (size_t k = 0; k < p.convergence.size(); ++k) {
    if (!SameBits(p.convergence[k], q.convergence[k])) return "convergence";
  }
  return "";
}

Case MemberCase(const Case& the_case, int64_t index) {
  Case member = the_case;
  member.problem.count = 1;
  for (Tensor Case::*input : kInputs) {
    member.*input = (the_case.*input).MemberTensor(index, the_case.problem.count);
  }
  return member;
}

Answer MemberAnswer(const Answer& answer, int64_t index, int64_t count) {
  Answer member;
  member.status = answer.status;
  member.report = answer.report;
  member.convergence = {answer.convergence[index]};
  for (const NamedOutput& output : kOutputs) {
    member.*output.tensor = (answer.*output.tensor).MemberTensor(index, count);
  }
  for (const NamedScalar& scalar : kScalars) {
    const Vector& values = answer.*scalar.values;
    if (!values.empty()) member.*scalar.values = {values[index]};
  }
  return member;
}

oracle::Transport MemberTransport(const Case& c, int64_t index) {
  const Problem& p = c.problem;
  oracle::Transport transport;
  transport.n = p.n;
  transport.m = p.m;
  transport.dim = p.dim;
  transport.point_cost = p.transport.point_cost;
  transport.kappa = p.transport.kappa;
  transport.solver = p.solver;
  transport.cost = c.cost.member(index, p.count);
  transport.x = c.x.member(index, p.count);
  transport.y = c.y.member(index, p.count);
  transport.a = c.a.member(index, p.count);
  transport.b = c.b.member(index, p.count);
  transport.initial_f = c.initial_f.member(index, p.count);
  transport.initial_g = c.initial_g.member(index, p.count);
  return oracle::WithKnownCost(oracle::WithUniformMasses(transport));
}

oracle::Normalization MemberNormalization(const Case& c, int64_t index) {
  const Problem& p = c.problem;
  oracle::Normalization problem;
  problem.n = p.n;
  problem.m = p.m;
  problem.logits = c.logits.member(index, p.count);
  problem.recipe = p.normalization.recipe;
  problem.iterations = p.solver.max_iterations;
  problem.row_marginals = c.row_marginals.member(index, p.count);
  problem.column_marginals = c.column_marginals.member(index, p.count);
  if (!c.dustbin_score.present()) return problem;
  return oracle::WithDustbin(problem, c.dustbin_score.member(index, p.count)[0]);
}

Case CaseOf(const oracle::Transport& problem, std::string name, DType dtype) {
  const auto pack = [dtype](const Vector& values) { return values.empty() ? Tensor() : Tensor::Of(values, dtype); };
  Case c;
  c.name = std::move(name);
  c.problem.kind = problem.cost.empty() ? ProblemKind::kPointCloud : ProblemKind::kDense;
  c.problem.n = problem.n;
  c.problem.m = problem.m;
  c.problem.dim = problem.dim;
  c.problem.transport.point_cost = problem.point_cost;
  c.problem.transport.kappa = problem.kappa;
  c.problem.solver = problem.solver;
  c.cost = pack(problem.cost);
  c.x = pack(problem.x);
  c.y = pack(problem.y);
  c.a = pack(problem.a);
  c.b = pack(problem.b);
  c.initial_f = pack(problem.initial_f);
  c.initial_g = pack(problem.initial_g);
  return c;
}

Case CaseOf(const oracle::Normalization& problem, std::string name, DType dtype) {
  const auto pack = [dtype](const Vector& values) { return values.empty() ? Tensor() : Tensor::Of(values, dtype); };
  Case c;
  c.name = std::move(name);
  c.problem.kind = ProblemKind::kNormalization;
  c.problem.n = problem.n;
  c.problem.m = problem.m;
  c.problem.normalization.recipe = problem.recipe;
  c.problem.solver.max_iterations = problem.iterations;
  c.logits = pack(problem.logits);
  c.row_marginals = pack(problem.row_marginals);
  c.column_marginals = pack(problem.column_marginals);
  c.wanted = kPlan | kSums;
  return c;
}

}  // namespace sinkhorn::conformance
