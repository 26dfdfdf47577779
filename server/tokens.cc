#include "server/tokens.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/log.h"

namespace sinkhorn {
namespace {

constexpr size_t kTokenCharacters = 16;  // At least.
constexpr char kScheme[] = "bearer ";

// Looks at each character whatever the others are.
bool Same(absl::string_view given, const std::string& token) {
  unsigned difference = given.size() ^ token.size();
  for (size_t i = 0; i < given.size(); ++i)
    difference |= static_cast<unsigned char>(given[i] ^ token[i % token.size()]);
  return difference == 0;
}

}  // namespace

absl::StatusOr<Tokens::List> Tokens::Read() const {
  List tokens;
  const absl::Status read = file_.Read([&tokens](std::string line) -> std::string {
    if (line.size() < kTokenCharacters || !std::all_of(line.begin(), line.end(), absl::ascii_isgraph))
      return absl::StrCat("a token of ", kTokenCharacters, " printable characters or more");
    tokens.push_back(std::move(line));
    return "";
  });
  if (!read.ok()) return read;
  if (tokens.empty()) return absl::InvalidArgumentError(absl::StrCat(file_.name(), " has no token"));
  return tokens;
}

absl::StatusOr<std::unique_ptr<Tokens>> Tokens::Load(const std::string& path) {
  std::unique_ptr<Tokens> tokens(new Tokens(path));
  absl::StatusOr<List> list = tokens->Read();
  if (!list.ok()) return list.status();
  tokens->tokens_ = std::make_shared<const List>(*std::move(list));
  tokens->file_.IsDue(absl::Now());
  return tokens;
}

void Tokens::Refresh() {
  if (!file_.IsDue(absl::Now())) return;
  absl::StatusOr<List> list = Read();
  if (!list.ok()) return Log(Severity::kError, "tokens_unchanged", {{"why", std::string(list.status().message())}});
  if (*list == *std::atomic_load(&tokens_)) return;
  Log(Severity::kInfo, "tokens_changed", {{"count", absl::StrCat(list->size())}});
  std::atomic_store(&tokens_, std::make_shared<const List>(*std::move(list)));
}

absl::string_view Tokens::In(absl::string_view authorization) {
  const size_t scheme = sizeof kScheme - 1;
  if (!absl::StartsWithIgnoreCase(authorization, kScheme)) return {};
  return absl::StripAsciiWhitespace(authorization.substr(scheme));
}

bool Tokens::Allow(absl::string_view authorization) {
  Refresh();
  const absl::string_view given = In(authorization);
  if (given.empty()) return false;
  const std::shared_ptr<const List> tokens = std::atomic_load(&tokens_);
  bool any = false;
  for (const std::string& token : *tokens) any |= Same(given, token);
  return any;
}

}  // namespace sinkhorn
