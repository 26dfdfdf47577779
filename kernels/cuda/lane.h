// One lane: a stream, its staging memory, and the course of a slice. Private to the backend.
#ifndef SINKHORN_KERNELS_CUDA_LANE_H_
#define SINKHORN_KERNELS_CUDA_LANE_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/side_stream.h"
#include "kernels/cuda/staging.h"

namespace sinkhorn {
namespace cuda {

// Memory that the problems of one slice were placed in together; free when the last of them has gone.
struct Parcel {
  PoolBlock device, pinned;
};

// A problem from Admit to its end.
class CudaSolve final : public Solve {
 public:
  CudaSolve(const Problem& problem, const Family* family, const DeviceInfo& device);

  bool done() const override { return done_; }
  absl::Status status() const override { return failure_.ok() ? resident_->status() : failure_; }
  SolveReport report() const override;
  Convergence progress() const override { return resident_ != nullptr ? resident_->progress() : Convergence(); }
  void FinishSoon() override {
    finish_soon_ = true;
    if (resident_ != nullptr) resident_->FinishSoon();
  }
  const char* family() const override { return family_->name(); }

 private:
  friend class Lane;
  void Fail(absl::Status status) {
    failure_.Update(std::move(status));  // It was OK. (nvcc takes an assignment for a status that nobody reads.)
    done_ = true;
  }

  const Problem problem;  // Where the caller's tensors are.
  const Family* const family_;
  const size_t input_bytes_, output_bytes_, workspace_bytes_;
  const bool reads_once_;
  bool done_ = false, finish_soon_ = false;
  absl::Status failure_;
  double h2d_seconds_ = 0, d2h_seconds_ = 0;

  // Once placed. The resident goes before its memory.
  std::shared_ptr<Parcel> parcel_;
  bool mapped_ = false;     // Its tensors are in pinned memory.
  char* inputs_ = nullptr;  // Where they begin, for host and device alike if mapped.
  char* outputs_ = nullptr;
  char* workspace_ = nullptr;
  std::unique_ptr<Resident> resident_;
};

class Lane final : public LaunchContext {
 public:
  static absl::StatusOr<std::unique_ptr<Lane>> Make(Context* context);
  ~Lane() override;

  // Backend::Advance.
  absl::Status Advance(absl::Span<Solve* const> solves, double slice_seconds);

  // LaunchContext, for families.
  const DeviceInfo& device() const override { return context_->info; }
  CUstream_st* stream() const override { return stream_; }
  CUstream_st* side_stream() const override { return side_.get(); }
  void Fork() override;
  void Join() override;
  const void* Upload(const void* data, size_t bytes) override;
  void* Scratch(size_t bytes) override { return scratch_.Take(bytes); }
  void* HostVisible(size_t bytes, void** device_address) override;

 private:
  explicit Lane(Context* context);
  using Solves = std::vector<CudaSolve*>;

  // -- The steps of a slice.
  void Place(const Solves& newcomers);
  void PlaceMapped(const Solves& solves);
  void PlaceTogether(const Solves& solves);
  bool PlaceOnDevice(absl::Span<CudaSolve* const> solves);
  absl::Status CopyIn(const Solves& newcomers);
  void MakeResident(CudaSolve* solve);
  absl::Status Launch(double slice_seconds);
  absl::Status Await();
  absl::Status Collect();
  absl::Status CopyOut(const Solves& finished);
  void FetchOutput(const CudaSolve& solve, char* at, char* host, size_t bytes);
  absl::Status CopyEntryLists(const Solves& finished);

  Context* const context_;
  cudaStream_t stream_ = nullptr;
  SideStream side_;
  cudaEvent_t copy_begin_ = nullptr, copy_end_ = nullptr;
  Signal slice_end_;
  Arena host_visible_, scratch_;
  Staging staging_;

  // Of the slice; members to keep their memory.
  Solves newcomers_, active_, finished_, mapped_, copied_;
  std::vector<Resident*> residents_;
  struct Group {
    const Family* family;
    size_t begin, end;  // In residents_.
  };
  std::vector<Group> groups_;
  std::vector<Transfer> transfers_;
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_LANE_H_
