#include "tests/conformance/check_hessian.h"

#include "tests/conformance/check.h"
#include "tests/oracle/transport_outputs.h"

namespace sinkhorn::conformance {

void ExpectMatchesHessian(const Case& member_case, const Answer& member) {
  const HessianInputs& hessian = member_case.problem.transport.hessian;
  const oracle::Transport problem = MemberTransport(member_case);
  const oracle::Potentials at = Converge(problem);
  const bool debias = member_case.solver().debias, strict = member_case.solver().precision == Precision::kStrict;
  Vector f_aa, g_bb;
  if (debias) {
    f_aa = ConvergeSymmetric(SelfProblemA(problem));
    g_bb = ConvergeSymmetric(SelfProblemB(problem));
  }
  const auto direction = [&](const Tensor& directions, int64_t q, int64_t points) {
    return directions.present() ? directions.member(q, hessian.count) : Vector(points * problem.dim, 0.0);
  };
  for (int64_t q = 0; q < hessian.count; ++q) {
    const Vector dx = direction(member_case.direction_x, q, problem.n);
    const Vector dy = direction(member_case.direction_y, q, problem.m);
    const Vector product =
        debias ? DivergenceHessianTimes(problem, at, f_aa, g_bb, dx, dy) : HessianTimes(problem, at, dx, dy);
    Vector actual = member.hessian_x.member(q, hessian.count);
    const Vector by_y = member.hessian_y.member(q, hessian.count);
    actual.insert(actual.end(), by_y.begin(), by_y.end());
    ExpectClose(strict ? "STRICT Hessian-vector products" : "DOUBLE Hessian-vector products", actual, product,
                (strict ? 1e-3 : 1e-8) * oracle::MaxAbs(product));
  }
}

}  // namespace sinkhorn::conformance
