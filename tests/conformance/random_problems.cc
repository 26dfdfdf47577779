#include "tests/conformance/random_problems.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sinkhorn::conformance {

double Random::Uniform(double low, double high) {
  const double unit = static_cast<double>(generator_() >> 11) * 0x1p-53;
  return low + (high - low) * unit;
}

double Random::Normal() {  // Box-Muller.
  const double radius = std::sqrt(-2 * std::log(1 - Uniform(0, 1)));
  return radius * std::cos(6.283185307179586 * Uniform(0, 1));
}

int64_t Random::Integer(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(generator_() % static_cast<uint64_t>(high - low + 1));
}

Vector Random::Uniforms(int64_t count, double low, double high) {
  Vector values(count);
  for (double& value : values) value = static_cast<float>(Uniform(low, high));
  return values;
}

Vector Random::Normals(int64_t count, double deviation) {
  Vector values(count);
  for (double& value : values) value = static_cast<float>(deviation * Normal());
  return values;
}

Vector Random::Masses(int64_t count, double total) {
  const double unit = std::ldexp(1.0, std::max(-20, std::ilogb(total) - 23));
  Vector masses = Uniforms(count, 0.1, 1);
  const double sum = std::accumulate(masses.begin(), masses.end(), 0.0);
  for (double& mass : masses) mass = std::ceil(mass / sum * (total / unit - count)) * unit;
  masses[0] += total - std::accumulate(masses.begin(), masses.end(), 0.0);
  return masses;
}

oracle::Transport RandomClouds(int64_t n, int64_t m, int64_t dim, double epsilon, uint64_t seed) {
  Random random(seed);
  oracle::Transport problem;
  problem.n = n;
  problem.m = m;
  problem.dim = dim;
  problem.x = random.Uniforms(n * dim, 0, 1);
  problem.y = random.Uniforms(m * dim, 0, 1);
  problem.a = random.Masses(n);
  problem.b = random.Masses(m);
  problem.solver.epsilon = epsilon;
  return problem;
}

oracle::Transport RandomDense(int64_t n, int64_t m, double epsilon, uint64_t seed) {
  Random random(seed);
  oracle::Transport problem;
  problem.n = n;
  problem.m = m;
  problem.cost = random.Uniforms(n * m, 0, 1);
  problem.a = random.Masses(n);
  problem.b = random.Masses(m);
  problem.solver.epsilon = epsilon;
  return problem;
}

oracle::Normalization RandomLogits(int64_t n, int64_t m, const Recipe& recipe, int iterations, double deviation,
                                   uint64_t seed) {
  oracle::Normalization problem;
  problem.n = n;
  problem.m = m;
  problem.logits = Random(seed).Normals(n * m, deviation);
  problem.recipe = recipe;
  problem.iterations = iterations;
  return problem;
}

}  // namespace sinkhorn::conformance
