// A block of kRowBlock rows of a transport problem against all columns: what a sweep does with it, its log-sum-exps,
// its plan.
//
// One sweep over the plan serves both sides: a block of rows is made (or read from the cache), its row sums give the
// new u, and while it is still in the nearest cache it is added, scaled by the new u, to the column sums. A row whose
// sum leaves the safe range is made anew around its own maximum; nothing else needs one.
//
// Blocks of one sweep may run on any threads: each writes its own rows of the state.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_BLOCKS_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_BLOCKS_H_

#include <cstdint>

#include "kernels/cpu/transport_state.h"
#include "kernels/cpu/work.h"

namespace sinkhorn::cpu {

// Sweeps blocks [begin, end): row sums, next scalings and, added to `acc` [padded columns], column sums. `*error` grows
// by the rows' residuals. False: symmetric updates met rows that only log-sum-exps can do.
template <typename TE, typename T>
bool SweepBlocks(TransportState<TE, T>* state, int64_t begin, int64_t end, T* acc, double* error, Scratch* scratch);

// log2 sum_j weight_j 2^(z_ij + the column's term) = max[r] + log2(sums[r]) of listed rows of `side`, whatever their
// range (rows[r] < 0: none).
template <typename TE, typename T>
void LogSumExps(const TransportState<TE, T>& state, int side, const int64_t* rows, TE* max, double* sums,
                Scratch* scratch);

// P of a block of `side` (rows[r] < 0: zeros), with its row sums. `workspace`: the cost's.
template <typename TE, typename T>
void PlanRows(const TransportState<TE, T>& state, int side, const int64_t* rows, T* plan, double* sums, TE* workspace);

// The same with each row multiplied by a factor of its own, for rows so light that P keeps few of their digits. `e`: a
// block of exponents.
template <typename TE, typename T>
void ScaledPlanRows(const TransportState<TE, T>& state, int side, const int64_t* rows, T* plan, double* sums, TE* e,
                    TE* workspace);

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_BLOCKS_H_
