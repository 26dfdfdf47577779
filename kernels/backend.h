// What a backend must do. Nothing else crosses between the scheduler and the arithmetic.
//
// A backend turns a Problem into a Solve: a resident computation that is advanced a slice at a time in the company of
// others. The scheduler owns Solves, decides which are resident and drops them at will; the backend decides how a slice
// is executed. Small problems finish in their first slice.
//
//   StatusOr<unique_ptr<Solve>> solve = backend->Admit(problem);     // Checks memory, copies nothing big.
//   while (!solve->done()) backend->Advance(lane, {solve, others...}, slice_seconds);
//   solve->status(), solve->report(); outputs are written.
//
// Guarantee: a Solve's results have the same bits alone, in any company, in any order, with any number of threads.
//
// Threads: Admit may be called from any thread. Advance may be called concurrently for different lanes with disjoint
// Solves; a backend has `lanes` of them (a GPU overlaps copies and compute by having two or three). A Solve may be
// destroyed on any thread while it is not being advanced.
#ifndef SINKHORN_KERNELS_BACKEND_H_
#define SINKHORN_KERNELS_BACKEND_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/problem.h"

namespace sinkhorn {

// A resident problem. Destroying an unfinished one abandons it and frees its memory.
class Solve {
 public:
  virtual ~Solve() = default;
  // True once outputs are written or the solve has failed. Only Advance changes it.
  virtual bool done() const = 0;
  // REQUIRES: done(). OK: outputs are written. FAILED_PRECONDITION: diverged (the message says what to change).
  // RESOURCE_EXHAUSTED: device memory. UNAVAILABLE: the device is lost. INTERNAL: a bug.
  virtual absl::Status status() const = 0;
  // REQUIRES: done() and status() OK.
  virtual SolveReport report() const = 0;
  // Progress so far, for logs and for answers at a deadline: iterations and last known marginal errors.
  virtual Convergence progress() const = 0;
  // Asks that iterating ends: the iterate reached by then, after one iteration at least, is the answer, with outputs
  // and certificate like any other, at one of the next slices: as if that had been its max_iterations, but for
  // StopReason::kTimeBudget and, where those choose the kernel, for rounding. Not while it is advanced. A Solve that
  // has stopped by itself does not mind. Only where Backend::can_finish_soon.
  virtual void FinishSoon() {}
  // The kernel family that solves it, a string literal, from the start; "" if the backend does not tell.
  virtual const char* family() const { return ""; }
};

struct DeviceDescription {
  std::string name;     // "cpu: AVX3_SPR, 2 threads"
  std::string backend;  // "cpu" or "cuda"
  int64_t memory_bytes = 0;
  int index = 0;  // Among the devices of this backend on this machine.
};

// Memory that a backend holds, by what it is for.
struct MemoryUse {
  const char* pool = "";  // A string literal.
  int64_t bytes = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual DeviceDescription device() const = 0;
  // Independent executors: Advance takes lane in [0, lanes()).
  virtual int lanes() const = 0;

  // Working memory in bytes that the problem will hold while resident, beyond its inputs and outputs.
  virtual int64_t WorkingBytes(const Problem& problem) const = 0;
  // Predicted seconds on an idle lane, to within a factor of two or so. For a tolerance, of max_iterations (an upper
  // end).
  virtual double PredictedSeconds(const Problem& problem) const = 0;

  // Whether transport problems heed Solve::FinishSoon.
  virtual bool can_finish_soon() const { return false; }

  // The field of the request that this backend cannot do, a string literal such as "point_cloud.cost"; null: it can
  // solve the problem. From kind, sizes and options alone; any thread.
  virtual const char* Unsupported(const Problem& problem) const {
    (void)problem;
    return nullptr;
  }

  // Makes the problem resident. REQUIRES: it is valid (server/validate says what that is) and not Unsupported.
  // RESOURCE_EXHAUSTED: its working memory cannot be had.
  virtual absl::StatusOr<std::unique_ptr<Solve>> Admit(const Problem& problem) = 0;

  // Advances all `solves` (none done, all of this backend) by a slice of about `slice_seconds` in total, in shared
  // launches; each makes progress. Returns when the slice is done. UNAVAILABLE: the device is lost, and with it every
  // Solve.
  virtual absl::Status Advance(int lane, absl::Span<Solve* const> solves, double slice_seconds) = 0;

  // What its pools hold now, the same pools at each call; for metrics.
  virtual std::vector<MemoryUse> memory() const { return {}; }
};

}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_BACKEND_H_
