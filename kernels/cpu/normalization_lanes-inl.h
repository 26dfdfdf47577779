// Solvers run to their end within one chunk: small members, one per lane, group after group.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_LANES_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_LANES_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_LANES_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/normalization_io-inl.h"
#include "kernels/cpu/normalization_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn {
namespace cpu {
namespace normalization {
namespace HWY_NAMESPACE {

// Where P of a group's members waits for the implicit backward pass: float64, one after the other.
inline MatrixTensor PlanStage(const NormalizationSpec& spec, int64_t members, Arena* arena) {
  if (!spec.implicit || !spec.forward) return {};
  double* data = arena->Take<double>(members * spec.n * spec.m);
  return {DType::kFloat64, data, spec.n, spec.m, false};
}

template <class Solver>
int64_t SolverBytes(const NormalizationSpec& spec) {
  Arena measure(nullptr);
  Solver(spec, &measure, MatrixTensor());
  return measure.used();
}

template <class Solver>
void RunToEnd(Solver* solver, void* stage) {
  do {
    for (int64_t b = 0; b < solver->blocks(); ++b) solver->RunBlock(b, stage);
  } while (solver->EndPass());
}

template <class Solver>
void SolveForwardGroups(const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
                        NormalizationTally* tally) {
  Arena measure(nullptr);
  const int64_t stage_bytes = Solver(spec, &measure, {}).stage_bytes();
  measure.Take<char>(stage_bytes);
  Arena arena(scratch->Get(measure.used()));
  Solver solver(spec, &arena, {});
  void* stage = arena.Take<char>(stage_bytes);
  for (int64_t first = 0; first < count; first += Solver::kMembers) {
    const int64_t size = std::min(Solver::kMembers, count - first);
    solver.Begin(members + first, size);
    if (members[first + size - 1] - members[first] == size - 1) {  // In order, as nearly always.
      solver.Fetch(members[first], size, members[first] + size, std::min(Solver::kMembers, count - first - size));
    } else {
      solver.Fetch(0, 0, 0, 0);
    }
    RunToEnd(&solver, stage);
    solver.Report(tally);
  }
}

// Forward, if there is one, then implicit backward.
template <class Forward, class Implicit>
void SolveImplicitGroups(const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
                         NormalizationTally* tally) {
  const auto carve = [&](Arena* arena, auto body) {
    const MatrixTensor plan = PlanStage(spec, Forward::kMembers, arena);
    Forward forward(spec, arena, plan);
    Implicit implicit(spec, arena, plan);
    void* stage = arena->Take<char>(std::max(forward.stage_bytes(), implicit.stage_bytes()));
    body(&forward, &implicit, stage);
  };
  Arena measure(nullptr);
  carve(&measure, [](Forward*, Implicit*, void*) {});
  Arena arena(scratch->Get(measure.used()));
  carve(&arena, [&](Forward* forward, Implicit* implicit, void* stage) {
    for (int64_t first = 0; first < count; first += Forward::kMembers) {
      const int64_t size = std::min(Forward::kMembers, count - first);
      const bool* store = nullptr;
      if (spec.forward) {
        forward->Begin(members + first, size);
        RunToEnd(forward, stage);
        forward->Report(tally);
        store = forward->group().store;
      }
      implicit->Begin(members + first, size, store);
      RunToEnd(implicit, stage);
      implicit->Report(tally);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_LANES_INL_H_
