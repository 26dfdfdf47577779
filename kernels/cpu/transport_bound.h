// An upper bound of a balanced problem's optimal value: the primal value of P rounded to the marginals.
//
//   P' = diag(min(1, a / r)) P;  P'' = P' diag(min(1, b / c'));  Q = P'' + (a - P'' 1)(b - P''^T 1)^T / |a - P'' 1|_1
//   bound = <C, Q> + eps KL(Q | a b^T)           Source: Altschuler, Weed & Rigollet (2017), algorithm 2.
// float64 throughout, four passes over the plan, each a phase of chunks. What rounding may have taken off the bound is
// added to it.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_BOUND_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_BOUND_H_

#include <cstdint>
#include <vector>

#include "kernels/cpu/buffer.h"
#include "kernels/cpu/transport_cost.h"
#include "kernels/cpu/work.h"

namespace sinkhorn::cpu {

class PrimalBound {
 public:
  // Masses and potentials in units of the cost, [padded]. `cost` and the masses outlive it.
  PrimalBound(const CostSource<double, double>* cost, double epsilon, const Buffer<double>* masses[2],
              const Buffer<double>* potentials[2]);

  int64_t chunk_count() const { return pass_ == kPasses ? 0 : chunks_; }
  void RunChunk(int64_t chunk, Scratch* scratch);
  void EndPhase();
  double value() const { return value_; }

 private:
  static constexpr int kPasses = 4;
  int side() const { return pass_ == 1 ? 1 : 0; }
  void Start();
  struct Total {
    double sum = 0, size = 0;  // Of terms, and of their magnitudes.
  };
  Total Objective(const int64_t* rows, const double* density, double* e, double* workspace) const;

  const CostSource<double, double>& cost_;
  const double epsilon_;
  const Buffer<double>* mass_[2];
  Buffer<double> term_[2];
  Buffer<double> weight_[2];  // of the rows' plan entries: a x, b y as they become known
  Buffer<double> sums_[2];    // plan sums of the pass
  Buffer<double> lack_[2];    // a - P'' 1, b - P''^T 1
  Buffer<double> zero_columns_;
  double lack_total_ = 0, value_ = 0;
  std::vector<Total> partial_;
  int pass_ = 0;
  int64_t chunks_ = 0, chunk_blocks_ = 1;
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_BOUND_H_
