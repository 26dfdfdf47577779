// The launches of the transport family: one function per kernel, defined beside it. All are asynchronous and neither
// allocate nor synchronise; errors are left for cudaGetLastError. `blocks` is the table's last first_block.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_LAUNCH_H_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/transport_types.cuh"

namespace sinkhorn {
namespace cuda {

// ---- transport_prepare.cu: inputs to the workspace, states to their start -----------------------------------------
// Blocks of a member: PrepareBlocks(job, step), in this order of steps.
constexpr int kPrepareSteps = 5;
int64_t PrepareBlocks(const Job& job, int step);
void LaunchPrepare(const LaunchTable& table, int64_t blocks, int step, cudaStream_t stream);

// ---- transport_half_step.cu ---------------------------------------------------------------------------------------
// One pass over one side of engines of `mode`. Blocks of a member: PassBlocks, kBound: of its first engine alone.
void LaunchHalfStep(const LaunchTable& table, int64_t blocks, bool dense, Mode mode, int side, Pass pass, int step,
                    cudaStream_t stream);

// ---- transport_cloud.cu: the same for clouds in float32, by tensor cores -------------------------------------------
// `planes`: 2, products as accurate as float32's; 1, one product of rounded coordinates.
void LaunchCloudStep(const LaunchTable& table, int64_t blocks, int planes, int64_t dim, int side, Pass pass,
                     cudaStream_t stream);

// ---- transport_on_chip.cu: whole solves, measured ------------------------------------------------------------------
// Up to `chunks` times kOnChipChunk iterations of engines in float32 whose job has `tiles` OnChipTiles. One block a
// member.
void LaunchOnChip(const LaunchTable& table, int64_t blocks, bool dense, int tiles, int chunks, cudaStream_t stream);

// ---- transport_apply.cu: passes over the plan ---------------------------------------------------------------------
int64_t ApplyBlocks(const Job& job, int side);
void LaunchApply(const LaunchTable& table, int64_t blocks, bool dense, Mode mode, int side, cudaStream_t stream);

// ---- transport_finish.cu ------------------------------------------------------------------------------------------
// Blocks of a member: BoundBlocks.
int64_t BoundBlocks(const Job& job);
void LaunchBoundStart(const LaunchTable& table, int64_t blocks, cudaStream_t stream);
void LaunchBoundValue(const LaunchTable& table, int64_t blocks, bool dense, cudaStream_t stream);
// Vectors: StoreBlocks of a member. Scalars: one block of a member, after all else.
int64_t StoreBlocks(const Job& job);
void LaunchStore(const LaunchTable& table, int64_t blocks, cudaStream_t stream);
void LaunchScalars(const LaunchTable& table, int64_t blocks, cudaStream_t stream);
// One block of a job: reports[k] for the table's job k.
void LaunchReport(const LaunchTable& table, JobReport* reports, cudaStream_t stream);

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_LAUNCH_H_
