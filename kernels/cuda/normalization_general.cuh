// The general kernel: a block, or of large members a team of them, solves a member as a whole, in float64 and in the
// log domain. Any shape, any logits, every recipe and every backward mode. Slow beside the others, which leave to it
// what they cannot hold.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_GENERAL_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_GENERAL_CUH_

#include "kernels/cuda/normalization_block.cuh"
#include "kernels/cuda/normalization_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr int kVectors = 8;  // Of each side, besides the potentials.

// What a block has come to when it leaves.
struct Progress {
  int64_t member;       // Those before it are solved.
  bool started;         // It has been begun, and is between iterations:
  bool is_newton;       // EXACT: what the next one evaluates.
  int32_t t, tries;     // The next iteration's number; EXACT: steps since one was accepted.
  double error, scale;  // Of the columns, or EXACT's; the step's.
};

// A slot of the workspace.
struct GeneralMemory {
  Progress* progress = nullptr;                     // Between launches.
  double* a = nullptr;                              // [rows, cols] log of the start matrix
  double* plan = nullptr;                           // [rows, cols] P
  double* bar = nullptr;                            // [rows, cols] dL/dP, then as it develops dL/dW
  double *u = nullptr, *v = nullptr;                // log u_t, log v_t of all iterations, or of two
  double *row_sums = nullptr, *col_sums = nullptr;  // log-sum-exps of all half steps, log u and log v left out
  double *row = nullptr, *col = nullptr;            // [kVectors, rows], [kVectors, cols]
  double* weights = nullptr;                        // [cols, cols]: EXACT
  TeamMemory team;                                  // All but the arrivals.

  // Returns the bytes.
  __host__ __device__ int64_t Carve(const Task& task, char* base) {
    double* next = reinterpret_cast<double*>(base);
    const auto take = [&](bool wanted, int64_t size) {
      double* taken = next;
      if (wanted) next += size;
      return taken;
    };
    const int64_t rows = task.rows, cols = task.cols, area = rows * cols;
    const int64_t slots = task.unrolled ? int64_t{task.iterations} + 1 : 2;
    static_assert(sizeof(Progress) % sizeof(double) == 0, "in doubles");
    progress = reinterpret_cast<Progress*>(take(true, sizeof(Progress) / sizeof(double)));
    a = take(task.forward, area);
    plan = take(true, area);
    bar = take(task.unrolled || task.implicit, area);
    u = take(task.forward, slots * rows);
    v = take(task.forward, slots * cols);
    row_sums = take(task.unrolled, slots * rows);
    col_sums = take(task.unrolled, slots * cols);
    row = take(true, kVectors * (rows + cols));  // The full system has vectors of both sides.
    col = take(true, kVectors * (rows + cols));
    weights = take(task.exact && cols <= kDenseColumns, cols * cols);
    const int64_t parts = TeamColumnParts(task.ranks, task.cols);
    static_assert(sizeof(LogSum) == 2 * sizeof(double), "in doubles");
    team.sums = take(task.ranks > 1, 2 * task.ranks);
    team.columns = reinterpret_cast<LogSum*>(take(parts > 1, 2 * parts * cols));
    return (reinterpret_cast<char*>(next) - base + 255) / 256 * 256;
  }
};

// What a member came to.
struct General {
  int iterations = 0;  // Done, or those whose result stands.
  double row_error = 0, col_error = 0;
  bool converged = false;
  StopReason reason = StopReason::kMaxIterations;
  bool finite = true;
};

// ---- Tensors, in the kernel's orientation ---------------------------------------------------------------------------
class Io {
 public:
  __device__ Io(const Task& task, int64_t member) : task_(task), member_(member) {}

  // Element (i, k) of the kernel's matrix: where it is in a tensor of P's shape.
  __device__ int64_t At(int i, int k) const {
    const int64_t n = task_.transposed ? k : i, m = task_.transposed ? i : k;
    return n * task_.m + m;
  }
  __device__ double Logit(int i, int k) const {
    const int row = task_.transposed ? k : i, col = task_.transposed ? i : k;
    const int bin = task_.has_dustbin ? 1 : 0, n = task_.n - bin, m = task_.m - bin;
    if (row >= n || col >= m) return Scalar(task_.dustbin);
    return Load(task_.logits, int64_t{n} * m, int64_t{row} * m + col);
  }
  __device__ double Given(int i, int k) const { return Load(task_.given_plan, Area(), At(i, k)); }
  __device__ double Cotangent(int i, int k) const { return Load(task_.cotangent, Area(), At(i, k)); }
  __device__ void StorePlan(int i, int k, double x) const {
    if (task_.plan.data != nullptr) StoreAs(task_.plan.dtype, task_.plan.data, member_ * Area() + At(i, k), x);
  }
  // Returns what belongs to the dustbin's score.
  __device__ double StoreGradient(int i, int k, double x) const {
    const int row = task_.transposed ? k : i, col = task_.transposed ? i : k;
    const int bin = task_.has_dustbin ? 1 : 0, n = task_.n - bin, m = task_.m - bin;
    if (row >= n || col >= m) return x;
    const int64_t at = (member_ * n + row) * m + col;
    if (task_.gradient.data != nullptr) StoreAs(task_.gradient.dtype, task_.gradient.data, at, x);
    return 0;
  }
  __device__ void StoreDustbinGradient(double x) const {
    const Output& output = task_.dustbin_gradient;
    if (output.data != nullptr) StoreAs(output.dtype, output.data, member_, x);
  }
  __device__ void StoreSum(bool of_rows, int k, double x) const {
    const Output& output = of_rows != task_.transposed ? task_.row_sums : task_.column_sums;
    const int size = of_rows ? task_.rows : task_.cols;
    if (output.data != nullptr) StoreAs(output.dtype, output.data, member_ * size + k, x);
  }
  // Of the kernel's rows (or columns), the dustbin's apart.
  __device__ double Marginal(bool of_rows, int k, double absent) const {
    const Tensor& tensor = of_rows != task_.transposed ? task_.row_marginals : task_.column_marginals;
    const int size = (of_rows ? task_.rows : task_.cols) - (task_.has_dustbin ? 1 : 0);
    return tensor.data == nullptr ? absent : Load(tensor, size, k);
  }

 private:
  __device__ int64_t Area() const { return int64_t{task_.n} * task_.m; }
  __device__ double Load(const Tensor& tensor, int64_t size, int64_t at) const {
    return LoadAs<double>(tensor.dtype, tensor.data, (tensor.shared ? 0 : member_ * size) + at);
  }
  __device__ double Scalar(const Tensor& tensor) const { return Load(tensor, 1, 0); }

  const Task& task_;
  const int64_t member_;
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_GENERAL_CUH_
