// Error details survive the way from a server's trailer to the caller.
#include "client/cpp/errors.h"

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"

namespace sinkhorn::client {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

google::rpc::Status FullStatus() {
  google::rpc::ErrorInfo info;
  info.set_reason("QUEUE_FULL");
  info.set_domain("sinkhorn");
  (*info.mutable_metadata())["limit"] = "1024";
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_nanos(250'000'000);
  google::rpc::BadRequest bad_request;
  google::rpc::BadRequest::FieldViolation* violation = bad_request.add_field_violations();
  violation->set_field("solver.epsilon");
  violation->set_description("must be > 0; got -1");
  google::rpc::Status status;
  status.set_code(8);
  status.set_message("queue is full");
  status.add_details()->PackFrom(info);
  status.add_details()->PackFrom(retry);
  status.add_details()->PackFrom(bad_request);
  return status;
}

void ExpectFull(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "queue is full");
  const ErrorDetails details = GetErrorDetails(status);
  EXPECT_EQ(details.reason, "QUEUE_FULL");
  EXPECT_EQ(details.domain, "sinkhorn");
  EXPECT_THAT(details.metadata, ElementsAre(Pair("limit", "1024")));
  ASSERT_EQ(details.fields.size(), 1u);
  EXPECT_EQ(details.fields[0].field, "solver.epsilon");
  EXPECT_EQ(details.fields[0].description, "must be > 0; got -1");
  EXPECT_EQ(details.retry_delay, absl::Milliseconds(250));
  EXPECT_EQ(Describe(status), "RESOURCE_EXHAUSTED (QUEUE_FULL): queue is full; retry after 250ms");
}

TEST(ErrorsTest, DetailsComeThroughTheTrailer) {
  const google::rpc::Status full = FullStatus();
  ExpectFull(
      FromGrpcStatus(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, full.message(), full.SerializeAsString())));
}

TEST(ErrorsTest, DetailsComeThroughAStreamReply) { ExpectFull(FromRpcStatus(FullStatus())); }

TEST(ErrorsTest, AMissingAnswerHasACause) {
  const absl::Time later = absl::InfiniteFuture();
  EXPECT_EQ(MissingAnswer(absl::Now()).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(MissingAnswer(later, /*cancelled=*/true).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(MissingAnswer(later).code(), absl::StatusCode::kInternal);

  const grpc::Status blocking(grpc::StatusCode::UNIMPLEMENTED, "No message returned for unary request");
  EXPECT_EQ(FromGrpcStatus(blocking, absl::Now()).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(FromGrpcStatus(blocking, later).code(), absl::StatusCode::kUnimplemented);
}

TEST(ErrorsTest, AStatusWithoutDetailsHasNone) {
  const absl::Status status = FromGrpcStatus(grpc::Status(grpc::StatusCode::UNAVAILABLE, "no connection"));

  EXPECT_EQ(status, absl::UnavailableError("no connection"));
  EXPECT_EQ(GetErrorDetails(status).reason, "");
  EXPECT_EQ(GetErrorDetails(status).retry_delay, absl::nullopt);
  EXPECT_EQ(Describe(status), "UNAVAILABLE: no connection");
}

TEST(ErrorsTest, UnreadableDetailsAreLeftOut) {
  const absl::Status status = FromGrpcStatus(grpc::Status(grpc::StatusCode::INTERNAL, "bug", "\xff\xff not a message"));
  EXPECT_EQ(status, absl::InternalError("bug"));

  google::rpc::Status broken;
  broken.set_code(13);
  broken.add_details()->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  broken.mutable_details(0)->set_value("\xff\xff");
  EXPECT_EQ(GetErrorDetails(FromRpcStatus(broken)).reason, "");
}

TEST(ErrorsTest, OkStaysOk) { EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok()); }

TEST(ErrorsTest, AnErrorWithoutACodeIsOne) {
  EXPECT_EQ(FromRpcStatus(google::rpc::Status()).code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace sinkhorn::client
