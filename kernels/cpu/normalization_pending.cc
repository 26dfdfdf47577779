// Holds the place of the normalisation kernels until they are linked: every normalisation fails with UNIMPLEMENTED.
#include "kernels/cpu/work.h"

namespace sinkhorn {
namespace cpu {
namespace {
class Pending final : public Work {
 public:
  int64_t chunk_count() const override { return 0; }
  double chunk_seconds() const override { return 0; }
  void RunChunk(int64_t, Scratch*) override {}
  void EndPhase() override {}
  absl::Status status() const override { return absl::UnimplementedError("normalization"); }
  SolveReport report() const override { return {}; }
  Convergence progress() const override { return {}; }
};
}  // namespace

std::unique_ptr<Work> MakeNormalizationWork(const Problem&) { return std::make_unique<Pending>(); }
int64_t NormalizationBytes(const Problem&) { return 0; }
double NormalizationSeconds(const Problem&) { return 0; }

}  // namespace cpu
}  // namespace sinkhorn
