// Hessian-vector products on the device: their launches, as transport_launch.h's. transport_hessian.cuh says what
// they are, transport_hessian_slice.cc what a slice enqueues.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_HESSIAN_H_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_HESSIAN_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_shape.cuh"

namespace sinkhorn {
namespace cuda {

// Directions that one block multiplies the plan with.
constexpr int kSweepTogether = 4;

// Working memory of a member's products, in bytes.
int64_t ProductBytesOf(const Job& job);
// Of a pair of sweeps of all members, launches left out; and of all that products take, at most.
double SweepPairSeconds(const Job& job);
double ProductSeconds(const Job& job);

// ---- transport_hessian_step.cu ------------------------------------------------------------------------------------
// States and what the answer tells; a step of every direction; how many are left, and how they ended.
struct ProductReport {
  int32_t running;  // Directions.
};
int64_t ProductStartBlocks(const Job& job);  // Of a member, as those that follow.
int64_t ProductStepBlocks(const Job& job);
void LaunchProductStart(const LaunchTable& table, int64_t blocks, cudaStream_t stream);
void LaunchProductStep(const LaunchTable& table, int64_t blocks, cudaStream_t stream);
// One block of a job: reports[k] for the table's job k.
void LaunchProductReport(const LaunchTable& table, ProductReport* reports, cudaStream_t stream);

// ---- transport_hessian_bend.cu: what bends the plan ---------------------------------------------------------------
// Right-hand sides and the diagonal of S; the products, where all directions of a member are done. Of members in modes
// that neither BendExactly nor HasMatrixKernel.
int64_t ProductSetupBlocks(const Job& job);
int64_t ProductStoreBlocks(const Job& job);
void LaunchProductSetup(const LaunchTable& table, int64_t blocks, Mode mode, cudaStream_t stream);
void LaunchProductStore(const LaunchTable& table, int64_t blocks, Mode mode, cudaStream_t stream);

// ---- transport_hessian_weights.cu: the same by float64's matrix units (Hopper) -------------------------------------
// For jobs with members in modes that BendExactly: their setup, after steps are there as doubles; weights of a chunk of
// a side's rows, and products of them. Jobs of a launch have the same ranks or splits; `dim`: the largest. Blocks of a
// member; of a job, none for chunks that it does not have.
bool BendsExactly(const Job& job, Mode mode);
int BentItems(const Job& job, int side);  // Job::weight_items, or 0.
int64_t BentWeightBytes(const Job& job);  // Of a member, for a chunk.
int64_t StepDoubleBlocks(const Job& job);
void LaunchStepDoubles(const LaunchTable& table, int64_t blocks, cudaStream_t stream);
int BentSetupRanks(const Job& job);
int64_t BentSetupBlocks(const Job& job);
void LaunchBentSetup(const LaunchTable& table, int64_t blocks, int dim, int ranks, cudaStream_t stream);
WeightLaunch BentLaunchOf(const Job& job, int side);
int64_t BentWeightBlocks(const Job& job, int side, int chunk, int splits);
int64_t BentSumBlocks(const Job& job, int side, int chunk, int ranks);
void LaunchBentWeights(const LaunchTable& table, int64_t blocks, int dim, int splits, int side, int chunk,
                       cudaStream_t stream);
void LaunchBentSums(const LaunchTable& table, int64_t blocks, int ranks, int side, int chunk, cudaStream_t stream);

// ---- transport_hessian_halves.cu, transport_hessian_matrix.cu: the same on Hopper's matrix units ------------------
// For jobs that HasMatrixKernel: their setup, after steps have been split, and their products, after potentials have
// been bounded. Jobs of one launch have the same planes, CloudRowBytes and MatrixRanks.
bool HasMatrixKernel(const Job& job, Mode mode);
int MatrixRanks(const Job& job);
int64_t StepScaleBlocks(const Job& job);
int64_t StepSplitBlocks(const Job& job);
int64_t PotentialBoundBlocks(const Job& job);
int64_t MatrixSetupBlocks(const Job& job);
int64_t MatrixStoreBlocks(const Job& job);
void LaunchStepScale(const LaunchTable& table, int64_t blocks, cudaStream_t stream);
void LaunchStepSplit(const LaunchTable& table, int64_t blocks, cudaStream_t stream);
void LaunchPotentialBound(const LaunchTable& table, int64_t blocks, cudaStream_t stream);
void LaunchMatrixSetup(const LaunchTable& table, int64_t blocks, int planes, int dim, int ranks, cudaStream_t stream);
void LaunchMatrixStore(const LaunchTable& table, int64_t blocks, int planes, int dim, int ranks, cudaStream_t stream);

// ---- transport_hessian_sphere.cu: cosines -------------------------------------------------------------------------
// Steps to the unit sphere, before all else; products from there, after it, where a member is done.
int64_t SphereBlocks(const Job& job);
void LaunchSphere(const LaunchTable& table, int64_t blocks, bool leaving, cudaStream_t stream);

// ---- transport_hessian_sweep.cu, transport_hessian_cloud.cu, transport_hessian_exact.cu ---------------------------
// The plan times what each direction wants next, by rows or by columns: plainly, for clouds in float32 (as
// LaunchCloudStep), and in kMixed (as LaunchExactStep). Jobs of one launch have one direction each (`alone`), or all
// more.
int64_t SweepBlocks(const Job& job, Mode mode, int side);
void LaunchSweep(const LaunchTable& table, int64_t blocks, Mode mode, bool alone, int side, cudaStream_t stream);
void LaunchCloudSweep(const LaunchTable& table, int64_t blocks, int planes, int dim, bool alone, bool hopper, int side,
                      cudaStream_t stream);
void LaunchExactSweep(const LaunchTable& table, int64_t blocks, int dim, bool alone, int side, cudaStream_t stream);

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_HESSIAN_H_
