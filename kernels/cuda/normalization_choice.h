// Which kernel solves a normalisation, by how many blocks and with how much memory, and how long it will take.
//
// By the problem's own shape, types and options alone: the bits of an answer depend on these.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_CHOICE_H_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_CHOICE_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/normalization_task.cuh"
#include "kernels/problem.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr int64_t kRegisterSide = 32;

// As the kernels are told of it; the launch's own numbers (blocks, workspace, tallies) are left out.
Task TaskOf(const Problem& problem);

enum class Kernel { kPlain, kTiles, kHeld, kStream, kBackward, kGeneral };
Kernel KernelOf(const Problem& problem, const Task& task);
// All tensors of 2 bytes an element: of kPlain's problems, which have float32 or these.
bool IsShort(const Task& task);
// Of the general kernel: a block's threads, a member's blocks, and how many of those the device surely runs at once.
int GeneralThreads(const Task& task);
int GeneralRanks(const DeviceInfo& device, const Task& task);
int64_t GeneralAtOnce(const DeviceInfo& device, const Task& task);

struct Shape {
  Kernel kernel = Kernel::kGeneral;  // Of the first launch,
  int size = 0;                      // for matrices of this size,
  int32_t blocks = 0;                // by so many blocks,
  int32_t ranks = 1;                 // so many a member,
  int64_t first_slot_bytes = 0;      // of so much workspace each,
  int64_t shared_bytes = 0;          // and dynamic shared memory.
  bool padded = false;               // kPlain: smaller than the tile.
  int32_t backward_blocks = 0;       // Of the implicit modes' kernel.
  int64_t redo_bytes = 0, redo_members = 1;
  int64_t plan_bytes = 0;      // P for the kernel that goes on with implicit modes:
  bool then_general = false;   // kStream: the general one.
  int32_t general_blocks = 0;  // Of the general kernel,
  int32_t general_ranks = 1;   // so many a member.
  int64_t slot_bytes = 0;

  int64_t slots_bytes() const { return std::max(first_slot_bytes * blocks, slot_bytes * general_slots()); }
  int64_t general_slots() const { return general_blocks / general_ranks; }
};
Shape ShapeOf(const DeviceInfo& device, const Problem& problem, const Task& task);

// Predicted seconds of the whole, and of one member by so many blocks of the general kernel among many at work.
double Seconds(const DeviceInfo& device, const Shape& shape, const Task& task);
// has_plan: whose P is there.
double GeneralSeconds(const Task& task, int ranks, bool has_plan);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_CHOICE_H_
