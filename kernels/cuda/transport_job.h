// From a problem to what the device needs to know of it.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_JOB_H_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_JOB_H_

#include "kernels/cuda/transport_shape.cuh"

namespace sinkhorn {
namespace cuda {

// What a device can do: Job's `hopper` and `wide_clusters`, and whether it has room for problems that are `held`.
struct DeviceKernels {
  bool hopper, wide_clusters, held;
};

// All but the workspace's address, whose layout depends on `hopper` alone.
Job JobOf(const Problem& problem, const DeviceKernels& kernels);

// Parts of a pass's columns that take the least time on a whole device: waves of blocks, each as long as its tiles and
// what a block has to do beside them.
int CloudSplits(int64_t rows, int64_t columns, int dim);

// The same of `tiles` of each of `blocks`, `at_once` of which a device has at once; `beside`: in tiles.
int BestSplits(int64_t blocks, int64_t tiles, int64_t at_once, double beside);

// Of one iteration of all members that is not held, launches left out.
double IterationSeconds(const Job& job);

// Of one that is held, of so many members.
double HeldIterationSeconds(const Job& job, int64_t members);

// Iterations of a looped job's launch: by its members' shape alone. Iterations go on with floats, which potentials
// between two launches are not, so that their number must not depend on who else is there.
int LoopChunk(const Job& job);

// The same of a launch of engines that are apart (transport_symmetric.cu).
int SymmetricChunk(const Job& job);

// Of a member's iterations that take a whole device: of all that are held, or of one launch of those that are looped;
// by guess where there is a tolerance. 0: there are none.
double TogetherSeconds(const Job& job);

// Members whose such iterations fit a slice, at least one: those that a slice serves.
int64_t TurnMembers(const Job& job, double slice_seconds);

// Of all iterations that a job may take, launches too.
double SolveSeconds(const Job& job);
// Of what is made of the plan, once it is measured.
double OutputSeconds(const Job& job);

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_JOB_H_
