// What leaves the SIMD translation units of the normalisation: solvers, compiled for several instruction sets and
// chosen at run time.
//
// A solver holds a group of members: as many small matrices as a vector has lanes, one per lane, or a single larger one
// whose rows are cut into vectors. Which of the two depends on the shape alone.
#ifndef SINKHORN_KERNELS_CPU_NORMALIZATION_KERNELS_H_
#define SINKHORN_KERNELS_CPU_NORMALIZATION_KERNELS_H_

#include <cstdint>
#include <vector>

#include "kernels/cpu/normalization_spec.h"
#include "kernels/cpu/work.h"
#include "kernels/problem.h"

namespace sinkhorn::cpu::normalization {

// What some members came to. `redo`: those whose range of values the solver could not hold; they are not counted.
struct NormalizationTally {
  Convergence worst;
  int64_t count = 0;  // Members
  bool finite = true;
  std::vector<int64_t> redo;

  // `members` of which `worst` is the worst.
  void Add(const Convergence& worst, int64_t members);
  void Merge(const NormalizationTally& other);  // All but `redo`.
};

// Members for a solver. 1 <= count <= its capacity.
struct MemberGroup {
  const int64_t* members = nullptr;
  int64_t count = 0;
  const bool* store = nullptr;  // [count]; null: the results of all are stored.
  // The `next_count` members from `next` on follow: their inputs are fetched in time.
  int64_t next = 0, next_count = 0;
};

// Solves a group pass by pass. The blocks of a pass may run concurrently.
class MatrixSolver {
 public:
  virtual ~MatrixSolver() = default;
  virtual int64_t capacity() const = 0;
  virtual void Begin(const MemberGroup& group) = 0;
  virtual int64_t blocks() const = 0;
  // `stage`: StageBytes(spec) that no other running block uses.
  virtual void RunBlock(int64_t block, void* stage) = 0;
  // All blocks of the pass have run. True: another pass follows.
  virtual bool EndPass() = 0;
  // REQUIRES: done.
  virtual void Report(NormalizationTally* tally) const = 0;
  virtual Convergence progress() const = 0;
  // [capacity()]: whether a lane's results were stored.
  virtual const bool* stored() const = 0;
};

// How a group is solved. Forward, a member that is beyond its solver goes to the next: its own data decide, nothing
// else.
enum class Kind : uint8_t {
  kFloat,      // Scaling vectors on exp(W - max) in float32: logits of a row within about 60.
  kDouble,     // The same in float64: within about 600.
  kDoubleLog,  // Potentials and log-sum-exps in float64: any logits.
  kExact,      // The recipe EXACT, float64.
  kImplicit,   // An implicit backward pass, float64.
};

bool SolvedInLanes(const NormalizationSpec& spec);
// Memory for a block of any solver.
int64_t StageBytes(const NormalizationSpec& spec);

// Memory of a solver, and the solver. `memory`: 128-byte aligned, alive as long as the solver; so is the spec. `plan`
// [capacity, n, m]: where forward solvers leave a copy of P, by lane, and kImplicit finds it. Null: no copy; kImplicit
// takes the problem's own plan. (kFloat leaves none.)
int64_t SolverBytes(Kind kind, const NormalizationSpec& spec);
MatrixSolver* MakeSolver(Kind kind, const NormalizationSpec& spec, void* memory, double* plan);

// The shapes that come by the million, solved whole by kernels of their own (as kFloat).
bool IsSquares(const NormalizationSpec& spec);
void SolveSquares(const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
                  NormalizationTally* tally);

}  // namespace sinkhorn::cpu::normalization

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_KERNELS_H_
