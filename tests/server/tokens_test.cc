// Bearer tokens and the file they come from.
#include "server/tokens.h"

#include <cstdio>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace sinkhorn {
namespace {

class TokensTest : public testing::Test {
 protected:
  const std::string path_ =
      testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name() + ".tokens";

  void Write(const std::string& text) {
    std::ofstream(path_ + ".new") << text;
    ASSERT_EQ(std::rename((path_ + ".new").c_str(), path_.c_str()), 0);
  }
};

TEST_F(TokensTest, AllowsTheFilesTokensAndNothingElse) {
  Write("# ours\n\n0123456789abcdef\n  another-token-of-ours \r\n");
  const auto tokens = Tokens::Load(path_);
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  for (const char* good : {"Bearer 0123456789abcdef", "bearer another-token-of-ours", "BEARER  0123456789abcdef "}) {
    EXPECT_TRUE((*tokens)->Allow(good)) << good;
  }
  for (const char* bad : {"", "Bearer", "Bearer ", "0123456789abcdef", "Basic 0123456789abcdef", "Bearer # ours",
                          "Bearer 0123456789abcdeF", "Bearer 0123456789abcde", "Bearer 0123456789abcdef0",
                          "Bearer 0123456789abcdef0123456789abcdef"}) {
    EXPECT_FALSE((*tokens)->Allow(bad)) << bad;
  }
}

TEST_F(TokensTest, BadFilesAreRefusedWithoutRepeatingThem) {
  EXPECT_TRUE(absl::StrContains(Tokens::Load(path_ + ".none").status().message(), "cannot be read"));
  Write("# nothing\n");
  EXPECT_TRUE(absl::StrContains(Tokens::Load(path_).status().message(), "has no token"));
  for (const char* secret : {"short", "two words that are long", "caf\xc3\xa9-with-an-accent"}) {
    Write(std::string("0123456789abcdef\n") + secret + "\n");
    const absl::Status status = Tokens::Load(path_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(), "line 2")) << status;
    EXPECT_FALSE(absl::StrContains(status.message(), secret)) << status;
  }
}

TEST_F(TokensTest, ANewFileCountsSoonAndADamagedOneChangesNothing) {
  Write("the-first-token-of-all\n");
  const auto tokens = Tokens::Load(path_);
  ASSERT_TRUE(tokens.ok());
  Write("the-second-token-of-all\n");
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (!(*tokens)->Allow("Bearer the-second-token-of-all") && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_TRUE((*tokens)->Allow("Bearer the-second-token-of-all"));
  EXPECT_FALSE((*tokens)->Allow("Bearer the-first-token-of-all"));
  Write("\n");
  absl::SleepFor(absl::Milliseconds(2200));
  EXPECT_TRUE((*tokens)->Allow("Bearer the-second-token-of-all"));
}

}  // namespace
}  // namespace sinkhorn
