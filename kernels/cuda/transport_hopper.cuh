// Hopper's own instructions, one function each: named barriers, matrices of 8 x 8, matrix products of a warpgroup.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_HOPPER_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_HOPPER_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/native.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {

// ---- Kernels that begin while the one before ends -----------------------------------------------------------------

// LaunchOverlapping where Hopper's code is in use; elsewhere a plain launch.
template <typename... Parameters, typename... Arguments>
inline void LaunchNext(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t smem_bytes,
                       cudaStream_t stream, const Arguments&... arguments) {
  return HasHopperKernels() ? LaunchOverlapping(kernel, blocks, threads, smem_bytes, stream, arguments...)
                            : LaunchKernel(kernel, blocks, threads, smem_bytes, stream, arguments...);
}

#if SINKHORN_HOPPER

// ---- Named barriers of `threads` threads: some arrive, the others wait for them too -------------------------------

__device__ inline void ArriveAt(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ inline void WaitAt(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// ---- Matrices of 8 x 8 numbers of 16 bits --------------------------------------------------------------------------
// Four: lane l names row l % 8 of matrix l / 8, and has elements (lane / 4, 2 (lane % 4) + 0..1) of each.

__device__ inline void StoreMatrices(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
// Elements (2 (lane % 4) + 0..1, lane / 4), as the next. Stored before the next barrier: loads may come before it.
__device__ inline void StoreTransposed(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3]));
}
__device__ inline void LoadTransposed(uint32_t row, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// ---- Products of a warpgroup --------------------------------------------------------------------------------------

// A number that a warp's threads share, in a register that its threads share: descriptors of matrices are wanted there.
__device__ inline uint32_t OfWarp(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }

// Where a matrix of halves lies in shared memory: rows of `row_bytes` (32, 64 or 128), 16-byte chunks exchanged within
// row_bytes * 8 as SwizzledAt says.
__device__ inline uint64_t MatrixAt(uint32_t address, int row_bytes) {
  const uint64_t swizzle = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
  const uint64_t stride = 8 * row_bytes / 16;  // Of eight rows.
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | stride << 32 | swizzle << 62;
}

__device__ inline void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most so many groups are under way.
template <int kGroups>
__device__ inline void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// The registers of sums, as operands' names and as operands.
#define SINKHORN_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SINKHORN_NAMES_16 SINKHORN_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SINKHORN_NAMES_32 \
  SINKHORN_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SINKHORN_NAMES_40 SINKHORN_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SINKHORN_NAMES_48 SINKHORN_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SINKHORN_NAMES_64                                                                                       \
  SINKHORN_NAMES_32                                                                                             \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SINKHORN_SUMS_8(c, j)                                                                                          \
  "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3]), "+f"(c[j + 1][0]), "+f"(c[j + 1][1]), "+f"(c[j + 1][2]), \
      "+f"(c[j + 1][3])
#define SINKHORN_SUMS_16(c, j) SINKHORN_SUMS_8(c, j), SINKHORN_SUMS_8(c, j + 2)
#define SINKHORN_SUMS_32(c, j) SINKHORN_SUMS_16(c, j), SINKHORN_SUMS_16(c, j + 4)
#define SINKHORN_SUMS_64(c, j) SINKHORN_SUMS_32(c, j), SINKHORN_SUMS_32(c, j + 8)

// c (+)= a b^T: 64 x 16 by 128 x 16 halves, to float. Thread t of the warpgroup has rows 16 (t / 32) + t % 32 / 4 (+ 8)
// and columns 8 j + 2 (t % 4) + 0..1: c[j] = {row, row; row + 8, row + 8}.
__device__ inline void MultiplyGroup(uint64_t a, uint64_t b, bool add, float (&c)[16][4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" SINKHORN_NAMES_64 "}, %64, %65, p, 1, 1, 0, 0;\n}"
      : SINKHORN_SUMS_64(c, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// The same of 64 columns.
__device__ inline void MultiplyGroup(uint64_t a, uint64_t b, bool add, float (&c)[8][4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" SINKHORN_NAMES_32 "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : SINKHORN_SUMS_32(c, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// The same of 80 and 96.
__device__ inline void MultiplyGroup(uint64_t a, uint64_t b, bool add, float (&c)[10][4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {" SINKHORN_NAMES_40 "}, %40, %41, p, 1, 1, 0, 0;\n}"
      : SINKHORN_SUMS_32(c, 0), SINKHORN_SUMS_8(c, 8)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ inline void MultiplyGroup(uint64_t a, uint64_t b, bool add, float (&c)[12][4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" SINKHORN_NAMES_48 "}, %48, %49, p, 1, 1, 0, 0;\n}"
      : SINKHORN_SUMS_32(c, 0), SINKHORN_SUMS_16(c, 8)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// c (+)= a b: 64 x 16 halves in registers by 16 x kColumns halves in shared memory, whose rows are contiguous.
template <int kColumns>
__device__ inline void MultiplyRows(const uint32_t (&a)[4], uint64_t b, bool add, float (&c)[kColumns / 8][4]);
template <>
__device__ inline void MultiplyRows<16>(const uint32_t (&a)[4], uint64_t b, bool add, float (&c)[2][4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {" SINKHORN_NAMES_8
      "}, "
      "{%8, %9, %10, %11}, %12, p, 1, 1, 1;\n}"
      : SINKHORN_SUMS_8(c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
template <>
__device__ inline void MultiplyRows<32>(const uint32_t (&a)[4], uint64_t b, bool add, float (&c)[4][4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" SINKHORN_NAMES_16
      "}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 1;\n}"
      : SINKHORN_SUMS_16(c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
template <>
__device__ inline void MultiplyRows<64>(const uint32_t (&a)[4], uint64_t b, bool add, float (&c)[8][4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" SINKHORN_NAMES_32
      "}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
      : SINKHORN_SUMS_32(c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

#endif  // SINKHORN_HOPPER

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_HOPPER_CUH_
