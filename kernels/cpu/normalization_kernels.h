// What leaves the SIMD translation units of the normalisation: solvers of groups of small matrices, one per lane, and of
// single larger matrices, compiled for several instruction sets and chosen at run time.
#ifndef SINKHORN_KERNELS_CPU_NORMALIZATION_KERNELS_H_
#define SINKHORN_KERNELS_CPU_NORMALIZATION_KERNELS_H_

#include <cstdint>
#include <vector>

#include "kernels/cpu/normalization_spec.h"
#include "kernels/cpu/work.h"
#include "kernels/problem.h"

namespace sinkhorn {
namespace cpu {
namespace normalization {

// How a member is solved. A tier that cannot hold a member's range of values hands it to the next one: its own data
// decide, nothing else. EXACT and the implicit backward passes begin with kDouble.
enum class Tier : uint8_t {
  kFloat,      // Scaling vectors on exp(W - max) in float32: logits of a row within about 60.
  kDouble,     // The same in float64: within about 600.
  kDoubleLog,  // Potentials and log-sum-exps in float64: any logits.
};

// Members up to this many elements are solved one per lane.
constexpr int64_t kLaneElements = 1024;

// What some members came to. `redo`: those that the tier could not hold; they are not counted.
struct NormalizationTally {
  Convergence worst;
  int64_t count = 0;  // Members
  bool finite = true;
  std::vector<int64_t> redo;

  // `members` of which `worst` is the worst.
  void Add(const Convergence& worst, int64_t members);
  void Merge(const NormalizationTally& other);  // All but `redo`.
};

// A matrix being solved, pass by pass. The blocks of a pass may run concurrently.
class MatrixSolver {
 public:
  virtual ~MatrixSolver() = default;
  // Begins with a member. `next` comes after it (-1: unknown): its inputs are fetched in time.
  virtual void BeginMember(int64_t member, int64_t next) = 0;
  virtual int64_t blocks() const = 0;
  // `stage`: StageBytes(spec) that no other running block uses.
  virtual void RunBlock(int64_t block, void* stage) = 0;
  // All blocks of the pass have run. True: another pass follows.
  virtual bool EndPass() = 0;
  // REQUIRES: done.
  virtual void Report(NormalizationTally* tally) const = 0;
  virtual Convergence progress() const = 0;
};

// ---- Small matrices, one per lane: whole members, forward and backward ----------------------------------------------------
void FloatLanes(const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
                NormalizationTally* tally);
void DoubleLanes(Tier tier, const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
                 NormalizationTally* tally);

// ---- One matrix: solvers that have yet to begin with a member -------------------------------------------------------------
// Enough for a block of any of them.
int64_t StageBytes(const NormalizationSpec& spec);

// Forward, with the unrolled backward pass if the spec has one. `memory`: of the stated size, 128-byte aligned, alive as
// long as the solver; so is the spec. With `plan_copy` [n, m] P is written there too.
int64_t FloatForwardBytes(const NormalizationSpec& spec);
MatrixSolver* MakeFloatForward(const NormalizationSpec& spec, void* memory);
int64_t DoubleForwardBytes(Tier tier, const NormalizationSpec& spec);
MatrixSolver* MakeDoubleForward(Tier tier, const NormalizationSpec& spec, void* memory, double* plan_copy);
// The implicit backward pass, from `plan` [n, m] or, where that is null, from the problem's own.
int64_t ImplicitBytes(const NormalizationSpec& spec);
MatrixSolver* MakeImplicit(const NormalizationSpec& spec, void* memory, const double* plan);

}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_KERNELS_H_
