// Which tensors a problem has and how many elements of each: the one list by which the backend places, copies and
// counts them. No CUDA here.
#ifndef SINKHORN_KERNELS_CUDA_TENSORS_H_
#define SINKHORN_KERNELS_CUDA_TENSORS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/problem.h"

namespace sinkhorn {
namespace cuda {

constexpr size_t AlignUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Calls visit(TensorView& view, size_t bytes) for every input that is there, in an order of its own.
template <class AProblem, class Visit>
void ForEachInput(AProblem& problem, const Visit& visit) {
  const auto see = [&](auto& view, int64_t elements) {
    if (view) visit(view, static_cast<size_t>((view.shared ? 1 : problem.count) * elements) * SizeOf(view.dtype));
  };
  const int64_t n = problem.n, m = problem.m;
  if (problem.kind == ProblemKind::kNormalization) {
    auto& in = problem.normalization;
    const int64_t extra = in.dustbin_score ? 1 : 0;
    see(in.logits, n * m);
    see(in.row_marginals, n);
    see(in.column_marginals, m);
    see(in.dustbin_score, 1);
    see(in.cotangent, (n + extra) * (m + extra));
    see(in.plan, (n + extra) * (m + extra));
    return;
  }
  auto& in = problem.transport;
  if (problem.kind == ProblemKind::kDense) {
    see(in.cost, n * m);
  } else {
    see(in.x, n * problem.dim);
    see(in.y, m * problem.dim);
  }
  see(in.a, n);
  see(in.b, m);
  see(in.initial_f, n);
  see(in.initial_g, m);
  see(in.v, m * in.v_columns);
  see(in.u, n * in.u_columns);
  see(in.hessian.x, in.hessian.count * n * problem.dim);
  see(in.hessian.y, in.hessian.count * m * problem.dim);
}

// Calls visit(void* data, size_t bytes, set) for every output that is wanted, where set(void*) renames its memory.
template <class AProblem, class Visit>
void ForEachOutput(AProblem& problem, const Visit& visit) {
  auto& out = problem.outputs;
  const int64_t count = problem.count, n = problem.n, m = problem.m, dim = problem.dim;
  const auto scalars = [&](auto*& data) {
    using T = std::remove_reference_t<decltype(*data)>;
    if (data != nullptr) visit(data, count * sizeof(T), [&](void* to) { data = static_cast<T*>(to); });
  };
  const auto tensor = [&](auto& view, int64_t elements) {
    if (view) visit(view.data, count * elements * SizeOf(view.dtype), [&](void* to) { view.data = to; });
  };
  scalars(out.convergence);
  const int64_t extra = problem.kind == ProblemKind::kNormalization && problem.normalization.dustbin_score ? 1 : 0;
  tensor(out.plan, (n + extra) * (m + extra));
  tensor(out.row_sums, n + extra);
  tensor(out.column_sums, m + extra);
  if (problem.kind == ProblemKind::kNormalization) {
    tensor(out.gradient_logits, n * m);
    tensor(out.gradient_dustbin_score, 1);
    return;
  }
  scalars(out.value);
  scalars(out.value_linear);
  scalars(out.dual_bound);
  scalars(out.primal_bound);
  tensor(out.f, n);
  tensor(out.g, m);
  tensor(out.f_aa, n);
  tensor(out.g_bb, m);
  tensor(out.gradient_x, n * dim);
  tensor(out.gradient_y, m * dim);
  tensor(out.gradient_a, n);
  tensor(out.gradient_b, m);
  tensor(out.gradient_cost, n * m);
  tensor(out.plan_v, n * problem.transport.v_columns);
  tensor(out.plan_transpose_u, m * problem.transport.u_columns);
  tensor(out.projection_x, n * dim);
  tensor(out.projection_y, m * dim);
  const int64_t directions = problem.transport.hessian.count;
  tensor(out.hessian_x, directions * n * dim);
  tensor(out.hessian_y, directions * m * dim);
  scalars(out.hessian_convergence);
  if (out.sparse_plan.max_entries == 0) return;
  const auto vector = [&](auto*& data, int64_t elements) {
    using T = std::remove_reference_t<decltype(*data)>;
    visit(data, count * elements * sizeof(T), [&](void* to) { data = static_cast<T*>(to); });
  };
  vector(out.sparse_plan.row_offsets, n + 1);
  vector(out.sparse_plan.mass, 1);
}

// The same for the outputs that are written in part: visit(void* data, size_t entry_bytes, set), of each member
// sparse_plan.max_entries entries, of which row_offsets tell how many there are.
template <class AProblem, class Visit>
void ForEachEntryList(AProblem& problem, const Visit& visit) {
  SparseOutput& out = problem.outputs.sparse_plan;
  if (problem.kind == ProblemKind::kNormalization || out.max_entries == 0) return;
  visit(out.columns, sizeof(int32_t), [&](void* to) { out.columns = static_cast<int32_t*>(to); });
  visit(out.values.data, SizeOf(out.values.dtype), [&](void* to) { out.values.data = to; });
}
inline size_t EntryListBytes(const Problem& problem, size_t entry_bytes) {
  return static_cast<size_t>(problem.count * problem.outputs.sparse_plan.max_entries) * entry_bytes;
}

// Bytes of all inputs and of all outputs, each tensor at a multiple of 256.
inline size_t InputBytes(const Problem& problem) {
  size_t total = 0;
  ForEachInput(problem, [&](const TensorView&, size_t bytes) { total += AlignUp(bytes); });
  return total;
}
inline size_t OutputBytes(Problem problem) {  // By value: the visitor's setter needs one that can be written.
  size_t total = 0;
  ForEachOutput(problem, [&](void*, size_t bytes, const auto&) { total += AlignUp(bytes); });
  ForEachEntryList(
      problem, [&](void*, size_t entry_bytes, const auto&) { total += AlignUp(EntryListBytes(problem, entry_bytes)); });
  return total;
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TENSORS_H_
