// One member of a transport request from inputs to stored outputs, as phases of chunks.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_MEMBER_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_MEMBER_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "kernels/cpu/transport_inputs.h"
#include "kernels/cpu/work.h"
#include "kernels/problem.h"

namespace sinkhorn::cpu {

class TransportMember {
 public:
  virtual ~TransportMember() = default;
  virtual int64_t chunk_count() const = 0;  // 0: outputs are stored.
  virtual double chunk_seconds() const = 0;
  virtual void RunChunk(int64_t chunk, Scratch* scratch) = 0;
  virtual void EndPhase() = 0;
  // No more iterations than needed for an answer. Not while a chunk runs.
  virtual void FinishSoon() = 0;
  virtual absl::Status status() const = 0;
  virtual Convergence progress() const = 0;
};

// Predicted seconds of making a density on one thread in float32: measured on AVX-512 cores. `dim` 0: from a cost.
inline double DensitySeconds(int64_t dim) { return 0.3e-9 + 0.012e-9 * static_cast<double>(dim); }

// Chooses the arithmetic from the member's own data. REQUIRES: `inputs` are loaded.
std::unique_ptr<TransportMember> MakeTransportMember(std::unique_ptr<MemberInputs> inputs, int64_t cache_bytes);

// TE, T: see transport_kernels.h.
template <typename TE, typename T>
std::unique_ptr<TransportMember> MakeTypedMember(const Problem& problem, int64_t index, int64_t cache_bytes,
                                                 std::unique_ptr<MemberInputs> inputs);

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_MEMBER_H_
