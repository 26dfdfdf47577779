// Identities of callers: numbers, weights, and what happens when there are too many.
#include "server/tenants.h"

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace sinkhorn {
namespace {

const absl::Time kNow = absl::FromUnixSeconds(1000);

absl::StatusOr<std::unique_ptr<Tenants>> FromText(const std::string& text) {
  const std::string path =
      testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name() + ".weights";
  std::ofstream(path) << text;
  return Tenants::Load(path);
}

TEST(TenantsTest, AnIdentityKeepsItsNumber) {
  Tenants tenants;
  const Tenant a = tenants.Of("peer:a", kNow), b = tenants.Of("peer:b", kNow);
  EXPECT_NE(a.number, b.number);
  EXPECT_GT(a.number, 0);
  EXPECT_EQ(tenants.Of("peer:a", kNow).number, a.number);
  EXPECT_EQ(a.weight, 1);
  EXPECT_EQ(tenants.count(), 2);
}

TEST(TenantsTest, TooManyShareNumberZeroUntilOneIsForgotten) {
  Tenants tenants;
  for (int i = 0; i < Tenants::kTenants; ++i) {
    const Tenant tenant = tenants.Of(absl::StrCat("peer:", i), kNow + absl::Seconds(i));
    EXPECT_GT(tenant.number, 0);
    EXPECT_LE(tenant.number, Tenants::kTenants);
  }
  EXPECT_EQ(tenants.Of("peer:x", kNow + absl::Minutes(9)).number, 0);
  EXPECT_EQ(tenants.Of("peer:y", kNow + absl::Minutes(9)).number, 0);
  EXPECT_EQ(tenants.count(), Tenants::kTenants);
  const int seen_again = tenants.Of("peer:0", kNow + absl::Minutes(9)).number;
  const int number = tenants.Of("peer:x", kNow + Tenants::kForget + absl::Seconds(2)).number;
  EXPECT_GT(number, 0);
  EXPECT_NE(number, seen_again);
  EXPECT_EQ(tenants.Of("peer:0", kNow + Tenants::kForget + absl::Seconds(2)).number, seen_again);
  EXPECT_LE(tenants.count(), Tenants::kTenants);
}

TEST(TenantsTest, WeightsComeFromTheFile) {
  const auto tenants = FromText("# ours\n\ncert:CN=big one,O=us 4\ntoken:0123456789ab\t0.5\n* 2\n");
  ASSERT_TRUE(tenants.ok()) << tenants.status();
  EXPECT_EQ((*tenants)->Of("cert:CN=big one,O=us", kNow).weight, 4);
  EXPECT_EQ((*tenants)->Of("token:0123456789ab", kNow).weight, 0.5);
  EXPECT_EQ((*tenants)->Of("peer:ipv4:10.0.0.1", kNow).weight, 2);
}

TEST(TenantsTest, ANewFileCountsSoonAndADamagedOneChangesNothing) {
  const auto tenants = FromText("a 4\n* 2\n");
  ASSERT_TRUE(tenants.ok()) << tenants.status();
  const auto weight_of = [&](const char* identity, int seconds) {
    return (*tenants)->Of(identity, kNow + absl::Seconds(seconds)).weight;
  };
  EXPECT_EQ(weight_of("a", 0), 4);
  const int number = (*tenants)->Of("a", kNow).number;
  ASSERT_TRUE(FromText("a 5\n* 3\n").ok());
  EXPECT_EQ(weight_of("a", 1), 4);  // Not looked at yet.
  EXPECT_EQ(weight_of("a", 3), 5);
  EXPECT_EQ(weight_of("b", 3), 3);
  EXPECT_EQ((*tenants)->Of("a", kNow + absl::Seconds(3)).number, number);
  ASSERT_FALSE(FromText("a 6\nb none\n").ok());
  EXPECT_EQ(weight_of("a", 6), 5);
  ASSERT_TRUE(FromText("b 7\n").ok());
  EXPECT_EQ(weight_of("a", 9), 1);
  EXPECT_EQ(weight_of("b", 9), 7);
}

TEST(TenantsTest, MetricsKnowByNameWhomTheFileNames) {
  const auto tenants = FromText("b 1\na 1\n");
  ASSERT_TRUE(tenants.ok()) << tenants.status();
  using Labels = std::vector<std::string>;
  EXPECT_EQ((*tenants)->labels(), (Labels{"other", "b", "a"}));
  EXPECT_EQ((*tenants)->Of("a", kNow).label, 2);
  EXPECT_EQ((*tenants)->Of("peer:stranger", kNow).label, 0);
  ASSERT_TRUE(FromText("a 1\nc 1\n").ok());
  EXPECT_EQ((*tenants)->Of("c", kNow + absl::Seconds(3)).label, 3);
  EXPECT_EQ((*tenants)->Of("a", kNow + absl::Seconds(3)).label, 2);
  EXPECT_EQ((*tenants)->Of("b", kNow + absl::Seconds(3)).label, 0);  // No longer named.
  std::string many;
  for (int i = 0; i < 2 * Tenants::kLabels; ++i) many += absl::StrCat("m", i, " 2\n");
  ASSERT_TRUE(FromText(many).ok());
  EXPECT_EQ((*tenants)->Of(absl::StrCat("m", 2 * Tenants::kLabels - 1), kNow + absl::Seconds(6)).label, 0);
  EXPECT_EQ((*tenants)->labels().size(), Tenants::kLabels);
}

TEST(TenantsTest, BadFilesNameTheLine) {
  EXPECT_TRUE(absl::StrContains(Tenants::Load("/no/such/file").status().message(), "cannot be read"));
  for (const char* bad : {"a", "a b", "a 0", "a -1", "a nan", "a inf"}) {
    const absl::Status status = FromText(absl::StrCat("x 1\n", bad, "\n")).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_TRUE(absl::StrContains(status.message(), "line 2")) << status;
  }
}

TEST(TenantsTest, APeerIsItsAddressWithoutThePort) {
  EXPECT_EQ(PeerIdentity("ipv4:127.0.0.1:50000"), "peer:ipv4:127.0.0.1");
  EXPECT_EQ(PeerIdentity("ipv6:%5B::1%5D:50000"), "peer:ipv6:%5B::1%5D");
  EXPECT_EQ(PeerIdentity("unix:/some/socket"), "peer:unix");
  EXPECT_EQ(PeerIdentity(""), "peer:");
}

TEST(TenantsTest, ATokenIsItsDigest) {
  // printf abc | sha256sum
  EXPECT_EQ(TokenIdentity("abc"), "token:ba7816bf8f01");
  EXPECT_FALSE(absl::StrContains(TokenIdentity("0123456789abcdef"), "0123456789abcdef"));
}

}  // namespace
}  // namespace sinkhorn
