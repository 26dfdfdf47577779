// The course of a slice, in the order of Advance: place, copy in, launch, await, collect, copy out.
#include "kernels/cuda/lane.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/tensors.h"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr size_t kHostVisibleBytes = 1 << 20;  // To begin with.
constexpr size_t kScratchBytes = 16 << 20;
// Of problems placed together: of their tensors, and with workspaces; larger ones are placed alone.
constexpr size_t kParcelTensorBytes = 8 << 20, kParcelBytes = 16 << 20;

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

// ---- A problem ------------------------------------------------------------------------------------------------------

CudaSolve::CudaSolve(const Problem& problem, const Family* family, const DeviceInfo& device)
    : problem(problem),
      family_(family),
      input_bytes_(InputBytes(problem)),
      output_bytes_(OutputBytes(problem)),
      workspace_bytes_(AlignUp(static_cast<size_t>(family->WorkspaceBytes(device, problem)))),
      reads_once_(family->ReadsInputsOnce(device, problem)) {}

SolveReport CudaSolve::report() const {
  SolveReport report = resident_->report();
  report.h2d_seconds = h2d_seconds_;
  report.d2h_seconds = d2h_seconds_;
  return report;
}

// ---- The lane -------------------------------------------------------------------------------------------------------

Lane::Lane(Context* context)
    : context_(context),
      host_visible_(&context->pinned_pool, kHostVisibleBytes),
      scratch_(&context->device_pool, std::min<size_t>(kScratchBytes, context->device_pool.limit_bytes() / 8)),
      staging_(context) {}

absl::StatusOr<std::unique_ptr<Lane>> Lane::Make(Context* context) {
  std::unique_ptr<Lane> lane(new Lane(context));
  cudaError_t error = cudaSetDevice(context->info.index);
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&lane->stream_, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&lane->copy_begin_, cudaEventDefault);
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&lane->copy_end_, cudaEventDefault);
  if (error == cudaSuccess) error = lane->side_.Init(lane->stream_);
  if (error == cudaSuccess) error = lane->slice_end_.Init(&context->pinned_pool);
  if (absl::Status status = context->Check(error, "making a lane"); !status.ok()) return status;
  if (absl::Status status = lane->staging_.Init(lane->stream_); !status.ok()) return status;
  lane->host_visible_.Reset();
  lane->scratch_.Reset();
  return lane;
}

Lane::~Lane() {
  (void)cudaSetDevice(context_->info.index);
  for (cudaEvent_t event : {copy_begin_, copy_end_}) {
    if (event != nullptr) (void)cudaEventDestroy(event);
  }
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

void Lane::Fork() { KeepLaunchError(side_.Fork()); }
void Lane::Join() { KeepLaunchError(side_.Join()); }

absl::Status Lane::Advance(absl::Span<Solve* const> solves, double slice_seconds) {
  if (absl::Status status = context_->Health(); !status.ok()) return status;
  const cudaError_t error = cudaSetDevice(context_->info.index);
  if (absl::Status status = context_->Check(error, "choosing the device"); !status.ok()) return status;
  host_visible_.Reset();
  scratch_.Reset();
  newcomers_.clear();
  active_.clear();
  for (Solve* solve : solves) active_.push_back(static_cast<CudaSolve*>(solve));
  for (CudaSolve* solve : active_) {
    if (solve->resident_ == nullptr) newcomers_.push_back(solve);
  }
  if (!newcomers_.empty()) {
    Place(newcomers_);
    const auto placed = [](const CudaSolve* solve) { return !solve->done_; };
    newcomers_.erase(std::stable_partition(newcomers_.begin(), newcomers_.end(), placed), newcomers_.end());
    active_.erase(std::stable_partition(active_.begin(), active_.end(), placed), active_.end());
    if (absl::Status status = CopyIn(newcomers_); !status.ok()) return status;
    for (CudaSolve* solve : newcomers_) MakeResident(solve);
  }
  if (active_.empty()) return absl::OkStatus();
  if (absl::Status status = Launch(slice_seconds); !status.ok()) return status;
  if (absl::Status status = Await(); !status.ok()) return status;
  return Collect();
}

// ---- Placing --------------------------------------------------------------------------------------------------------

// Finds memory for each, or fails it.
void Lane::Place(const Solves& newcomers) {
  mapped_.clear();
  copied_.clear();
  size_t mapped_bytes = 0;
  for (CudaSolve* solve : newcomers) {
    const size_t bytes = solve->input_bytes_ + solve->output_bytes_;
    const bool small = solve->reads_once_ && bytes <= static_cast<size_t>(context_->options.zero_copy_problem_bytes);
    if (small) mapped_bytes += bytes;
    (small ? mapped_ : copied_).push_back(solve);
  }
  if (mapped_bytes > static_cast<size_t>(context_->options.zero_copy_slice_bytes)) {
    copied_.insert(copied_.end(), mapped_.begin(), mapped_.end());
    mapped_.clear();
  }
  if (!mapped_.empty()) PlaceMapped(mapped_);
  if (!copied_.empty()) PlaceTogether(copied_);
}

// All tensors in one pinned block, all workspaces in one of the device's.
void Lane::PlaceMapped(const Solves& solves) {
  size_t tensors = 0, workspaces = 0;
  for (const CudaSolve* solve : solves) {
    tensors += solve->input_bytes_ + solve->output_bytes_;
    workspaces += solve->workspace_bytes_;
  }
  auto parcel = std::make_shared<Parcel>();
  parcel->pinned = PoolBlock(&context_->pinned_pool, tensors);
  if (workspaces > 0) parcel->device = PoolBlock(&context_->device_pool, workspaces);
  if (parcel->pinned.data() == nullptr || (workspaces > 0 && parcel->device.data() == nullptr)) {
    return PlaceTogether(solves);  // Which fails those that are too much.
  }
  char* tensor = parcel->pinned.data();
  char* workspace = parcel->device.data();
  for (CudaSolve* solve : solves) {
    solve->parcel_ = parcel;
    solve->mapped_ = true;
    solve->inputs_ = tensor;
    solve->outputs_ = tensor + solve->input_bytes_;
    tensor += solve->input_bytes_ + solve->output_bytes_;
    solve->workspace_ = workspace;
    workspace += solve->workspace_bytes_;
  }
}

// In the order given, so many at a time that fit a parcel; alone where there is no memory for several.
void Lane::PlaceTogether(const Solves& solves) {
  for (size_t begin = 0, end; begin < solves.size(); begin = end) {
    size_t tensors = 0, workspaces = 0;
    for (end = begin; end < solves.size(); ++end) {
      tensors += solves[end]->input_bytes_ + solves[end]->output_bytes_;
      workspaces += solves[end]->workspace_bytes_;
      if (end > begin && (tensors > kParcelTensorBytes || tensors + workspaces > kParcelBytes)) break;
    }
    if (PlaceOnDevice(absl::MakeConstSpan(solves).subspan(begin, end - begin))) continue;
    for (size_t i = begin; i < end; ++i) {
      CudaSolve* solve = solves[i];
      if (PlaceOnDevice({&solve, 1})) continue;
      solve->Fail(absl::ResourceExhaustedError(
          absl::StrCat("the problem needs ", solve->input_bytes_ + solve->output_bytes_ + solve->workspace_bytes_,
                       " bytes of device memory; not available")));
    }
  }
}

// One block: all inputs, all outputs, all workspaces.
bool Lane::PlaceOnDevice(absl::Span<CudaSolve* const> solves) {
  size_t inputs = 0, outputs = 0, workspaces = 0;
  for (const CudaSolve* solve : solves) {
    inputs += solve->input_bytes_;
    outputs += solve->output_bytes_;
    workspaces += solve->workspace_bytes_;
  }
  auto parcel = std::make_shared<Parcel>();
  parcel->device = PoolBlock(&context_->device_pool, inputs + outputs + workspaces);
  char* input = parcel->device.data();
  if (input == nullptr) return false;
  char* output = input + inputs;
  char* workspace = output + outputs;
  // Whatever a kernel leaves out (padding, by right), no reply carries what another request left here. A failure shows
  // at the copies that follow.
  (void)cudaMemsetAsync(output, 0, outputs, stream_);
  for (CudaSolve* solve : solves) {
    solve->parcel_ = parcel;
    solve->mapped_ = false;
    solve->inputs_ = std::exchange(input, input + solve->input_bytes_);
    solve->outputs_ = std::exchange(output, output + solve->output_bytes_);
    solve->workspace_ = std::exchange(workspace, workspace + solve->workspace_bytes_);
  }
  return true;
}

// ---- To the device --------------------------------------------------------------------------------------------------

absl::Status Lane::CopyIn(const Solves& newcomers) {
  const auto begin = std::chrono::steady_clock::now();
  transfers_.clear();
  for (CudaSolve* solve : newcomers) {
    char* at = solve->inputs_;
    ForEachInput(solve->problem, [&](const TensorView& view, size_t bytes) {
      if (solve->mapped_) {
        std::memcpy(at, view.data, bytes);
      } else {
        transfers_.push_back({at, const_cast<char*>(static_cast<const char*>(view.data)), bytes});
      }
      at += AlignUp(bytes);
    });
  }
  if (!transfers_.empty()) {
    if (absl::Status status = context_->Check(cudaEventRecord(copy_begin_, stream_), "timing a copy"); !status.ok()) {
      return status;
    }
    if (absl::Status status = staging_.In(transfers_); !status.ok()) return status;
    if (absl::Status status = context_->Check(cudaEventRecord(copy_end_, stream_), "timing a copy"); !status.ok()) {
      return status;
    }
  }
  const double seconds = SecondsSince(begin);
  for (CudaSolve* solve : newcomers) solve->h2d_seconds_ = seconds;
  return absl::OkStatus();
}

void Lane::MakeResident(CudaSolve* solve) {
  Problem on_device = solve->problem;
  char* at = solve->inputs_;
  ForEachInput(on_device, [&](TensorView& view, size_t bytes) {
    view.data = at;
    at += AlignUp(bytes);
  });
  at = solve->outputs_;
  ForEachOutput(on_device, [&](void*, size_t bytes, const auto& rename) {
    rename(at);
    at += AlignUp(bytes);
  });
  ForEachEntryList(on_device, [&](void*, size_t entry_bytes, const auto& rename) {
    rename(at);
    at += AlignUp(EntryListBytes(on_device, entry_bytes));
  });
  solve->resident_ = solve->family_->Make(on_device, solve->workspace_);
  if (solve->finish_soon_) solve->resident_->FinishSoon();
}

// ---- Launching ------------------------------------------------------------------------------------------------------

const void* Lane::Upload(const void* data, size_t bytes) {
  char* pinned = host_visible_.Take(bytes);
  if (pinned == nullptr) return nullptr;
  std::memcpy(pinned, data, bytes);
  if (bytes <= kMappedUploadBytes) return pinned;
  char* device = scratch_.Take(bytes);
  if (device == nullptr) return pinned;
  const cudaError_t error = cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, stream_);
  return error == cudaSuccess ? device : nullptr;
}

void* Lane::HostVisible(size_t bytes, void** device_address) {
  char* pinned = host_visible_.Take(bytes);
  if (pinned != nullptr) std::memset(pinned, 0, bytes);
  *device_address = pinned;
  return pinned;
}

// Every family once, for all its residents.
absl::Status Lane::Launch(double slice_seconds) {
  if (context_->CountSlice()) LaunchFault(stream_);
  residents_.clear();
  groups_.clear();
  const auto grouped = [this](const Family* family) {
    return std::any_of(groups_.begin(), groups_.end(), [&](const Group& group) { return group.family == family; });
  };
  for (const CudaSolve* first : active_) {
    if (!groups_.empty() && groups_.back().family == first->family_) continue;
    if (grouped(first->family_)) continue;
    const size_t begin = residents_.size();
    for (CudaSolve* solve : active_) {
      if (solve->family_ == first->family_) residents_.push_back(solve->resident_.get());
    }
    groups_.push_back({first->family_, begin, residents_.size()});
  }
  for (const Group& group : groups_) {
    const auto residents = absl::MakeConstSpan(residents_).subspan(group.begin, group.end - group.begin);
    const absl::Status status = group.family->Launch(residents, slice_seconds / groups_.size(), this);
    if (!status.ok()) {
      // What the family says may be a bug of its own or the sign of a lost device; Check knows the latter.
      if (absl::Status lost = context_->Check(cudaErrorUnknown, status.message()); absl::IsUnavailable(lost)) {
        return lost;
      }
      // Nothing enqueued may outlive its memory.
      (void)cudaStreamSynchronize(side_.get());
      (void)cudaStreamSynchronize(stream_);
      return absl::InternalError(absl::StrCat(group.family->name(), ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

absl::Status Lane::Await() {
  cudaError_t error = slice_end_.Mark(stream_);
  if (error == cudaSuccess) error = slice_end_.Await(context_->options.spin_us);
  return context_->Check(error, "awaiting a slice");
}

// ---- From the device ------------------------------------------------------------------------------------------------

absl::Status Lane::Collect() {
  if (!transfers_.empty() && !newcomers_.empty()) {
    float milliseconds = 0;
    if (cudaEventElapsedTime(&milliseconds, copy_begin_, copy_end_) == cudaSuccess) {
      for (CudaSolve* solve : newcomers_) solve->h2d_seconds_ = std::max(solve->h2d_seconds_, 1e-3 * milliseconds);
    }
  }
  for (const Group& group : groups_) {
    group.family->Collect(absl::MakeConstSpan(residents_).subspan(group.begin, group.end - group.begin));
  }
  finished_.clear();
  for (CudaSolve* solve : active_) {
    if (solve->resident_->done()) finished_.push_back(solve);
  }
  if (absl::Status status = CopyOut(finished_); !status.ok()) return status;
  for (CudaSolve* solve : finished_) solve->done_ = true;
  return absl::OkStatus();
}

absl::Status Lane::CopyOut(const Solves& finished) {
  if (finished.empty()) return absl::OkStatus();
  const auto begin = std::chrono::steady_clock::now();
  transfers_.clear();
  bool lists = false;
  for (CudaSolve* solve : finished) {
    if (!solve->resident_->status().ok()) continue;
    char* at = solve->outputs_;
    Problem problem = solve->problem;
    ForEachOutput(problem, [&](void* host, size_t bytes, const auto&) {
      FetchOutput(*solve, at, static_cast<char*>(host), bytes);
      at += AlignUp(bytes);
    });
    lists = lists || problem.outputs.sparse_plan.max_entries > 0;
  }
  if (absl::Status status = staging_.Out(transfers_); !status.ok()) return status;
  if (lists) {
    if (absl::Status status = CopyEntryLists(finished); !status.ok()) return status;
  }
  const double seconds = SecondsSince(begin);
  for (CudaSolve* solve : finished) solve->d2h_seconds_ = seconds;
  return absl::OkStatus();
}

// From pinned memory at once; what lies on the device becomes one of transfers_.
void Lane::FetchOutput(const CudaSolve& solve, char* at, char* host, size_t bytes) {
  if (bytes == 0) return;
  if (solve.mapped_) {
    std::memcpy(host, at, bytes);
  } else {
    transfers_.push_back({at, host, bytes});
  }
}

// Each member's entries, as many as the row offsets say, which have come.
absl::Status Lane::CopyEntryLists(const Solves& finished) {
  transfers_.clear();
  for (CudaSolve* solve : finished) {
    if (!solve->resident_->status().ok()) continue;
    Problem problem = solve->problem;
    const SparseOutput& sparse = problem.outputs.sparse_plan;
    char* at = solve->outputs_;
    ForEachOutput(problem, [&](void*, size_t bytes, const auto&) { at += AlignUp(bytes); });
    ForEachEntryList(problem, [&](void* host, size_t entry_bytes, const auto&) {
      for (int64_t member = 0; member < problem.count; ++member) {
        const int64_t entries = sparse.row_offsets[member * (problem.n + 1) + problem.n];
        if (entries > sparse.max_entries) continue;
        const size_t offset = static_cast<size_t>(member * sparse.max_entries) * entry_bytes;
        FetchOutput(*solve, at + offset, static_cast<char*>(host) + offset, static_cast<size_t>(entries) * entry_bytes);
      }
      at += AlignUp(EntryListBytes(problem, entry_bytes));
    });
  }
  return staging_.Out(transfers_);
}

}  // namespace cuda
}  // namespace sinkhorn
