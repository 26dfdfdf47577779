// What the iterations of a transport problem work on: two sides with their frames, scalings and sums, and perhaps the
// densities between them.
//
//   density T_ij = 2^(z_ij + frame_x[i] + frame_y[j])
//   F = frame_x + log2 u,  G = frame_y + log2 v          potentials, base 2, / epsilon
//
// Frames are potentials frozen when densities were computed; while the scalings u, v stay within 2^+-kDrift a cached T
// serves all iterations.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_STATE_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_STATE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/cpu/buffer.h"
#include "kernels/cpu/transport_cost.h"
#include "kernels/cpu/transport_kernels.h"

namespace sinkhorn::cpu {

// Scalings stay within [1 / kDrift, kDrift]: what densities lose below 2^-126 stays below 2^-90.
constexpr double kDrift = 0x1p+36;
// Sums outside [kTiny, kHuge] may have lost entries that count.
constexpr double kTiny = 0x1p-60, kHuge = 0x1p+80;

// False for NaN too.
inline bool IsSafe(double sum) { return sum > kTiny && sum < kHuge; }
inline bool IsNear(double scaling) { return scaling >= 1 / kDrift && scaling <= kDrift; }
inline bool IsRepresentable(double scaling) {
  constexpr double kMax = 0x1p+100;
  return scaling > 1 / kMax && scaling < kMax;
}
// A scaling that stands for 2^exponent and stays finite.
template <typename T>
T ScalingOf(double exponent) {
  constexpr double kMax = 100;
  return static_cast<T>(std::exp2(std::min(std::max(exponent, -kMax), kMax)));
}

// The rows' or the columns'. Arrays are [padded].
template <typename TE, typename T>
struct TransportSide {
  // `masses` [size], `initial` [size] potentials in units of the cost or null for 0, `cost_shift` [padded] likewise.
  void Init(int64_t count, const double* masses, const double* initial, const Buffer<double>& cost_shift,
            double epsilon, double reach_rho);

  double Potential(int64_t i) const { return frame[i] + std::log2(static_cast<double>(scaling[i])); }
  void Potentials(Buffer<double>* out) const;
  // Frames at these potentials.
  void Freeze(const Buffer<double>& potential);
  void SetWeights();
  bool Drifted() const { return !kernels.within(size, scaling.data(), T(1 / kDrift), T(kDrift)); }
  double Damping(double epsilon) const { return 1 / (1 + epsilon / rho); }

  const TransportKernels<TE, T>& kernels = GetTransportKernels<TE, T>();
  int64_t size = 0;
  double rho = 0;
  double total_mass = 0;
  Buffer<T> mass;
  Buffer<double> mass64;
  Buffer<TE> penalty;    // 0, or kVoid where there is no mass
  Buffer<double> shift;  // the cost's, * log2(e) / epsilon
  Buffer<double> frame;
  Buffer<TE> term;         // the same; kVoid where padded
  Buffer<T> scaling;       // u or v
  Buffer<T> next;          // those of the sweep in progress
  Buffer<T> weight;        // mass * scaling; that of the rows is up to date outside sweeps
  Buffer<double> pending;  // potentials that a safe phase found, or that were before a block was remade
  Buffer<double> sums;     // weighted sums of T over the other side
};

template <typename TE, typename T>
struct TransportState {
  TransportState(const CostSource<TE, T>* source, bool is_symmetric) : cost(*source), symmetric(is_symmetric) {}

  bool balanced() const { return std::isinf(side[0].rho) && std::isinf(side[1].rho); }
  // A potential before the sweep in progress. Base 2, / epsilon.
  double Potential(int which, int64_t i) const;
  // After it, from the sum.
  double NextPotential(int which, int64_t i) const;
  // What marginal / mass is at the optimum: 1; unbalanced: exp(-f / rho).
  double Target(int which, int64_t i) const;
  double ErrorOf(int which, int64_t i, double ratio) const;
  // The sum of all.
  double TotalError(int which, const Buffer<double>& ratio) const;
  // Potentials keep their values in units of the cost.
  void SetEpsilon(double next_epsilon);
  // The block's rows get other frames in this sweep: their potentials before it are in pending from now on.
  void KeepRows(int64_t row);
  // Takes the sweep back that ran last, as far as frames go: the state is what it began with.
  void RestoreRows();

  const CostSource<TE, T>& cost;
  const TransportKernels<TE, T>& kernels = GetTransportKernels<TE, T>();
  const bool symmetric;
  bool plain = false;     // Balanced and alternating: updates need no logarithm unless over-relaxed.
  bool first = true;      // What was before does not matter.
  bool measures = false;  // The sweep changes nothing.
  double epsilon = 0;
  double relax = 1;  // Of the sweep in progress.
  TransportSide<TE, T> side[2];
  Buffer<T> cache;           // [padded rows, padded columns]; empty: densities are not kept.
  bool cache_valid = false;  // It holds the densities of these frames.
  std::vector<char> remade;  // Per block: rows with new frames; their potentials before are in pending.
};

// ---- One side -------------------------------------------------------------------------------------------------------

template <typename TE, typename T>
void TransportSide<TE, T>::Init(int64_t count, const double* masses, const double* initial,
                                const Buffer<double>& cost_shift, double epsilon, double reach_rho) {
  const int64_t padded = cost_shift.size();
  const double unit = kLog2E / epsilon;
  size = count;
  rho = reach_rho;
  for (auto* buffer : {&mass, &scaling, &next, &weight}) buffer->Resize(padded);
  for (auto* buffer : {&mass64, &shift, &frame, &pending, &sums}) buffer->Resize(padded);
  for (auto* buffer : {&penalty, &term}) buffer->Resize(padded);
  for (int64_t i = 0; i < padded; ++i) {
    const double own = i < size ? masses[i] : 0;
    mass[i] = static_cast<T>(own);
    mass64[i] = own;
    penalty[i] = static_cast<TE>(own > 0 ? 0 : kVoid);
    shift[i] = cost_shift[i] * unit;
    const double potential = i < size && initial != nullptr ? initial[i] : 0;
    pending[i] = potential * unit - shift[i];
  }
  total_mass = std::accumulate(masses, masses + size, 0.0);
  Freeze(pending);
}

template <typename TE, typename T>
void TransportSide<TE, T>::Potentials(Buffer<double>* out) const {
  if (out->size() != frame.size()) out->Resize(frame.size());
  kernels.log_scaling(frame.size(), scaling.data(), frame.data(), out->data());
}

template <typename TE, typename T>
void TransportSide<TE, T>::Freeze(const Buffer<double>& potential) {
  kernels.freeze(frame.size(), size, potential.data(), term.data(), frame.data(), scaling.data());
  SetWeights();
}

template <typename TE, typename T>
void TransportSide<TE, T>::SetWeights() {
  for (int64_t i = 0; i < mass.size(); ++i) weight[i] = mass[i] == 0 ? T(0) : mass[i] * scaling[i];
}

// ---- Both -----------------------------------------------------------------------------------------------------------

template <typename TE, typename T>
double TransportState<TE, T>::Potential(int which, int64_t i) const {
  return which == 0 && remade[i / kRowBlock] ? side[0].pending[i] : side[which].Potential(i);
}

template <typename TE, typename T>
double TransportState<TE, T>::NextPotential(int which, int64_t i) const {
  const TransportSide<TE, T>& s = side[which];
  const double half_step = s.frame[i] - std::log2(s.sums[i]);
  const double damped = s.Damping(epsilon) * (half_step + s.shift[i]) - s.shift[i];
  if (relax == 1) return damped;
  const double old = Potential(which, i);
  return old + relax * (damped - old);
}

template <typename TE, typename T>
double TransportState<TE, T>::Target(int which, int64_t i) const {
  const TransportSide<TE, T>& s = side[which];
  return std::isinf(s.rho) ? 1 : std::exp2(-(Potential(which, i) + s.shift[i]) * epsilon / s.rho);
}

template <typename TE, typename T>
double TransportState<TE, T>::ErrorOf(int which, int64_t i, double ratio) const {
  const double mass = side[which].mass64[i];
  if (mass == 0) return 0;
  const double error = mass * std::abs(ratio - Target(which, i));
  return std::isnan(error) ? INFINITY : error;  // Both beyond all numbers; a NaN would vanish in a maximum.
}

template <typename TE, typename T>
double TransportState<TE, T>::TotalError(int which, const Buffer<double>& ratio) const {
  const TransportSide<TE, T>& s = side[which];
  double sum[4] = {};  // Chains of additions.
  if (std::isinf(s.rho)) {
    for (int64_t i = 0; i < s.size; ++i) sum[i % 4] += s.mass64[i] == 0 ? 0 : s.mass64[i] * std::abs(ratio[i] - 1);
  } else {
    for (int64_t i = 0; i < s.size; ++i) sum[i % 4] += ErrorOf(which, i, ratio[i]);
  }
  const double total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  return std::isnan(total) ? INFINITY : total;
}

template <typename TE, typename T>
void TransportState<TE, T>::SetEpsilon(double next_epsilon) {
  const double ratio = epsilon / next_epsilon;
  epsilon = next_epsilon;
  Buffer<double> potential;
  for (TransportSide<TE, T>& s : side) {
    s.Potentials(&potential);
    for (double& value : potential) value *= ratio;
    for (double& value : s.shift) value *= ratio;
    s.Freeze(potential);
  }
  cache_valid = false;
}

template <typename TE, typename T>
void TransportState<TE, T>::KeepRows(int64_t row) {
  const int64_t end = std::min(row + kRowBlock, side[0].size);
  for (int64_t i = row; i < end; ++i) side[0].pending[i] = Potential(0, i);
  remade[row / kRowBlock] = 1;
}

template <typename TE, typename T>
void TransportState<TE, T>::RestoreRows() {
  if (std::count(remade.begin(), remade.end(), 0) == static_cast<int64_t>(remade.size())) return;
  Buffer<double> potential(cost.padded(0));
  for (int64_t i = 0; i < cost.size(0); ++i) potential[i] = Potential(0, i);
  side[0].Freeze(potential);
  std::fill(remade.begin(), remade.end(), 0);
  cache_valid = false;
}

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_STATE_H_
