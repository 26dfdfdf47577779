// A resident problem as the CPU backend sees it: a sequence of phases, each a number of independent chunks.
//
// The backend takes the current phases of all its residents and runs their chunks in one parallel loop over its
// threads, so a ragged batch fills the cores like one large problem. Chunks are cut by a problem's own shape, never by
// the number of threads or by its company, and partial results are combined in chunk order: that is why the bits are
// the same alone, in a batch and on any number of threads.
#ifndef SINKHORN_KERNELS_CPU_WORK_H_
#define SINKHORN_KERNELS_CPU_WORK_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "kernels/problem.h"

namespace sinkhorn::cpu {

// Memory of one thread that chunks may overwrite at will: grows, never shrinks during a slice. 128-byte aligned.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  // At least `bytes`; the contents are undefined. Invalidates what it returned before.
  void* Get(size_t bytes);

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

class Work {
 public:
  virtual ~Work() = default;
  // Chunks of the current phase. 0: the work is finished.
  virtual int64_t chunk_count() const = 0;
  // Predicted seconds of one chunk of the current phase on one thread; chunks should take 20 us to 1 ms each where the
  // problem allows it. Whole small problems are one chunk.
  virtual double chunk_seconds() const = 0;
  // Between phases: says whether the work has the threads to itself, so that a small one is worth cutting up. Changes
  // the current phase's chunks, never what they compute.
  virtual void SetAlone(bool alone) { (void)alone; }
  // Whether phases to come are sure to have chunks for several threads: helpers are called while a serial one runs.
  virtual bool WillSplit() const { return false; }
  // Runs one chunk. Called once for each, from any thread, concurrently with the phase's other chunks.
  virtual void RunChunk(int64_t chunk, Scratch* scratch) = 0;
  // All chunks of the phase have run: combines them and moves to the next phase. Serial, so short.
  virtual void EndPhase() = 0;

  // REQUIRES: finished.
  virtual absl::Status status() const = 0;
  virtual SolveReport report() const = 0;
  virtual Convergence progress() const = 0;
};

// Whether the problem is solved in float64: where DOUBLE is asked for, and by processors without vectors always. They
// have float64 for the price of float32, whose long sums and unfused products need lanes and FMA to keep STRICT's word.
bool SolvesInDouble(const Problem& problem);

// REQUIRES: problem.kind fits. The problem's views stay valid while the work lives.
std::unique_ptr<Work> MakeNormalizationWork(const Problem& problem);
std::unique_ptr<Work> MakeTransportWork(const Problem& problem, int64_t kernel_cache_bytes);

// Resident bytes and predicted seconds on one thread, beyond inputs and outputs.
int64_t NormalizationBytes(const Problem& problem);
int64_t TransportBytes(const Problem& problem, int64_t kernel_cache_bytes);
double NormalizationSeconds(const Problem& problem);
double TransportSeconds(const Problem& problem);

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_WORK_H_
