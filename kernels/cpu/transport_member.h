// One member of a transport request from inputs to stored outputs, as phases of chunks.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_MEMBER_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_MEMBER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cpu/transport_cost.h"
#include "kernels/cpu/work.h"
#include "kernels/problem.h"

namespace sinkhorn {
namespace cpu {

// The member's inputs as doubles, and what is derived from them.
struct MemberInputs {
  // Costs are surveyed in parts, by any threads, before all else is loaded.
  static int64_t PartCount(const Problem& problem);  // 0: point clouds.
  MemberInputs(const Problem& problem, int64_t index) : problem(problem), index(index), costs(PartCount(problem)) {}
  void SurveyPart(int64_t part);
  void Load();

  const Problem& problem;
  const int64_t index;
  std::vector<CostRange> costs;  // Of each part's rows.
  Cloud x, y;                    // Point clouds only.
  std::vector<double> a, b;      // Masses.
  std::vector<double> f, g;      // Initial potentials; empty: none given.
  double cost_max = 0;           // Bound of what the exponents' terms are made of, in units of the cost.
  double epsilon_start = 0;      // Of an annealed schedule.
};

class TransportMember {
 public:
  virtual ~TransportMember() = default;
  virtual int64_t chunk_count() const = 0;  // 0: outputs are stored.
  virtual double chunk_seconds() const = 0;
  virtual void RunChunk(int64_t chunk, Scratch* scratch) = 0;
  virtual void EndPhase() = 0;
  virtual absl::Status status() const = 0;
  virtual Convergence progress() const = 0;
};

// Chooses the arithmetic from the member's own data. REQUIRES: `inputs` are loaded.
std::unique_ptr<TransportMember> MakeTransportMember(std::unique_ptr<MemberInputs> inputs, int64_t cache_bytes);

// TE, T: see transport_kernels.h.
template <typename TE, typename T>
std::unique_ptr<TransportMember> MakeTypedMember(const Problem& problem, int64_t index, int64_t cache_bytes,
                                                 std::unique_ptr<MemberInputs> inputs);

}  // namespace cpu
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_MEMBER_H_
