#include "server/load_report.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/time/time.h"
#include "xds/data/orca/v3/orca_load_report.pb.h"

namespace sinkhorn {
namespace {

using Outcome = LoadReport::Outcome;
using xds::data::orca::v3::OrcaLoadReport;

class LoadReportTest : public testing::Test {
 protected:
  OrcaLoadReport Of(Outcome outcome, double device_seconds = 0) {
    OrcaLoadReport decoded;
    EXPECT_TRUE(decoded.ParseFromString(report_.Of(outcome, device_seconds, now_)));
    return decoded;
  }
  // So many seconds of one answer a tenth, each worth a hundredth of two lanes' time. The last report.
  OrcaLoadReport Serve(double seconds) {
    OrcaLoadReport last;
    for (int i = 0; i < seconds * 10; ++i) {
      now_ += absl::Milliseconds(100);
      busy_ += 0.002;
      cpu_ += 0.1;
      last = Of(Outcome::kAnswered, 0.25);
    }
    return last;
  }

  double busy_ = 0, backlog_ = 1.5, cpu_ = 0;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  LoadReport report_{{[this] { return busy_; }, [this] { return backlog_; }, [this] { return cpu_; }, 2, 4}, now_};
};

TEST_F(LoadReportTest, SaysWhatBalancersWeighBy) {
  const OrcaLoadReport report = Serve(20);
  EXPECT_NEAR(report.application_utilization(), 0.01, 1e-6);
  EXPECT_NEAR(report.cpu_utilization(), 0.25, 1e-6);
  EXPECT_NEAR(report.rps_fractional(), 10, 1e-6);
  EXPECT_EQ(report.eps(), 0);
  EXPECT_EQ(report.named_metrics().at("backlog_seconds"), 1.5);
  EXPECT_EQ(report.request_cost().at("device_seconds"), 0.25);
}

TEST_F(LoadReportTest, TheFirstReportIsOfWhatThereWasAndLaterOnesFade) {
  EXPECT_EQ(Of(Outcome::kAnswered).rps_fractional(), 0);  // Nothing is known yet.
  EXPECT_NEAR(Serve(0.2).rps_fractional(), 20, 2);        // Two in the first tenth; then one, fading.
  Serve(20);
  busy_ += 100;  // A burst is forgotten.
  EXPECT_GT(Serve(0.1).application_utilization(), 1);
  EXPECT_NEAR(Serve(40).application_utilization(), 0.01, 1e-4);
}

TEST_F(LoadReportTest, CountsTheServersFaultsAsErrorsAndTheCallersAsNothing) {
  for (int i = 0; i < 100; ++i) {
    now_ += absl::Milliseconds(100);
    for (Outcome outcome : {Outcome::kFailed, Outcome::kFailed, Outcome::kRefused, Outcome::kAnswered}) Of(outcome);
  }
  const OrcaLoadReport report = Of(Outcome::kRefused);
  EXPECT_NEAR(report.eps(), 20, 0.2);
  EXPECT_NEAR(report.rps_fractional(), 10, 0.2);
  EXPECT_EQ(report.request_cost_size(), 0);
}

}  // namespace
}  // namespace sinkhorn
