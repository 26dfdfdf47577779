// The inner loops of entropic transport: blocks of rows against all columns.
//
// Everything is in base-2 logarithms divided by epsilon: z_ij = -C_ij log2(e) / epsilon plus a term of the row and one
// of the column, so that 2^(z + row_term + col_term) is the plan's density exp((f_i + g_j - C_ij) / epsilon).
//
// TE is the type of exponents, T that of densities and scalings: <float, float> (STRICT), <double, float> (STRICT where
// the cost spans too many epsilons for float32 exponents), <double, double> (DOUBLE).
//
// Shapes    a block is kRowBlock rows by `columns`, a multiple of kColumnPad (both sides are padded, with terms kVoid,
//           weights 0 and densities 0), laid out in tiles of kRowBlock x kTile, each row by row: see BlockIndex. A
//           sweep reads a block as one stream. Base pointers are 64-byte aligned.
// Accuracy  densities: 2e-7 (float) or 1e-15 (double) relative plus the rounding of the exponent; sums are kept in T
//           over at most 4096 columns, then in double.
// Densities below 2^-126 become 0, those above 2^127 saturate: never infinite.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_KERNELS_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_KERNELS_H_

#include <cstdint>

namespace sinkhorn::cpu {

constexpr int kRowBlock = 8;
constexpr int kColumnPad = 32;
constexpr int kTile = 16;
constexpr double kVoid = -1e30;  // Term of what does not exist: its densities are 0.

// Where row r, column j of a block is.
constexpr int64_t BlockIndex(int64_t r, int64_t j) { return j / kTile * (kTile * kRowBlock) + r * kTile + j % kTile; }

template <typename TE, typename T>
struct TransportKernels {
  // Columns per packed panel: packed[(j / panel) * dim * panel + k * panel + j % panel] = y[j][k], zero where padded.
  int panel;

  // rows: [kRowBlock, dim], row-major.
  //   scale = 0: out[r][j] = <rows[r], y[j]> + row_term[r] + col_term[j];
  //   scale < 0: out[r][j] = scale |rows[r] - y[j]|^2 + row_term[r] + col_term[j], which costs twice as much and
  //   cancels nothing;
  //   scale > 0: out[r][j] = -scale |rows[r] - y[j]| + row_term[r] + col_term[j], likewise.
  void (*exponents)(const TE* rows, int64_t dim, const TE* packed, int64_t columns, TE scale, const TE* row_term,
                    const TE* col_term, TE* out);
  // out[r][j] = 2^(the same), sums[r] = sum_j out[r][j] * weights[j].
  void (*exp_sums)(const TE* rows, int64_t dim, const TE* packed, int64_t columns, TE scale, const TE* row_term,
                   const TE* col_term, const T* weights, T* out, double* sums);

  // The same from rows of costs, `count` each, unaligned: exponents are cost * scale + row_term + col_term, and cost
  // nothing beyond `count`.
  void (*cost_exponents)(const TE* const* rows, int64_t count, int64_t columns, TE scale, const TE* row_term,
                         const TE* col_term, TE* out);
  void (*cost_exp_sums)(const TE* const* rows, int64_t count, int64_t columns, TE scale, const TE* row_term,
                        const TE* col_term, const T* weights, T* out, double* sums);

  // max[r] = max_j (e[r][j] + penalty[j]).
  void (*row_max)(const TE* e, int64_t columns, const TE* penalty, TE* max);
  // out[r][j] = 2^(e[r][j] - shift[r]), sums[r] = sum_j out[r][j] * weights[j].
  void (*exp_rows)(const TE* e, int64_t columns, const TE* shift, const T* weights, T* out, double* sums);

  // sums[r] = sum_j t[r][j] * weights[j].
  void (*row_sums)(const T* t, int64_t columns, const T* weights, double* sums);
  // acc[j] += sum_r w[r] * t[r][j].
  void (*add_columns)(const T* t, int64_t columns, const T* w, T* acc);
  // t[r][j] *= row[r] * col[j]: densities to plan entries; sums[r] of the results.
  void (*scale)(T* t, int64_t columns, const T* row, const T* col, double* sums);
  // out[r][c] = sum_j p[r][j] * v[j][c], c < width; width a multiple of 16; v and out [kRowBlock, width] are row-major.
  void (*multiply)(const T* p, int64_t columns, const T* v, int64_t width, double* out);
  // sum over the block of p[r][j] * e[r][j].
  double (*dot)(const T* p, int64_t columns, const TE* e);

  // Plain balanced updates, where nothing needs a logarithm.
  //   rows of one block: next = 1 / sums;  weight = mass * (keep ? u : next), 0 where there is no mass.
  //   Returns the block's residual sum mass |u sums - 1|.
  double (*balanced_rows)(const double* sums, const T* u, const T* mass, bool keep, T* next, T* weight);
  //   Cached densities, whole blocks that hold `rows` rows: row_sums, balanced_rows and add_columns of each in turn.
  //   Stops before a row with a sum outside (low, high), or a few rows earlier; returns the rows done.
  int64_t (*balanced_sweep)(const T* t, int64_t columns, int64_t rows, const T* weights, const T* u, const T* mass,
                            bool keep, double low, double high, double* sums, T* next, T* acc, double* error);
  //   columns: sums[j] = sum over slots of acc[slot * stride + j];  next = 1 / sums;  weight = mass * next.
  //   `count` is a multiple of kColumnPad; range[0..1] are the smallest and largest sum of the first `size`.
  void (*balanced_columns)(int64_t count, int64_t size, const T* acc, int64_t slots, int64_t stride, const T* mass,
                           double* sums, T* next, T* weight, double* range);

  // The scaling update of `count` rows (a multiple of 8). With frame = log2 of the density's frozen row term, S = sums
  // * 2^-frame:
  //   F_old = frame + log2 u;  F' = damping (shift - log2 S) - shift;  u_new = 2^(F_old + relax (F' - F_old) - frame)
  // damping = 1 and relax = 1: u_new = 1 / sums.  A sum of 0 gives infinity.
  void (*update)(int64_t count, const double* sums, const T* u, const double* frame, const double* shift,
                 double damping, double relax, T* u_new);
  // out[i] = frame[i] + log2(u[i]);  count a multiple of 8.
  void (*log_scaling)(int64_t count, const T* u, const double* frame, double* out);
  // Whether all values are inside (low, high).
  bool (*within)(int64_t count, const T* values, T low, T high);
  // term = potential rounded, frame = the same, scaling = 2^(what rounding took off), kept within 2^+-100;
  // beyond `size` kVoid, 0 and 1.  count a multiple of 8.
  void (*freeze)(int64_t count, int64_t size, const double* potential, TE* term, double* frame, T* scaling);
};

// The tables of the best instruction set here.
template <typename TE, typename T>
const TransportKernels<TE, T>& GetTransportKernels();
template <>
const TransportKernels<float, float>& GetTransportKernels();
template <>
const TransportKernels<double, float>& GetTransportKernels();
template <>
const TransportKernels<double, double>& GetTransportKernels();

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_KERNELS_H_
