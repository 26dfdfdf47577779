// An array as it is given on the command line: a .npy file, a text file, or the numbers themselves.
//
//   --x=points.npy        --a=masses.csv        --cost=0,1;1,0        --dustbin_score=0.5
#ifndef SINKHORN_CLIENT_CLI_ARRAY_INPUT_H_
#define SINKHORN_CLIENT_CLI_ARRAY_INPUT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn::client {

// Reads `value`: a file whose name ends in .npy; a text file that ends in .csv, .tsv or .txt (rows are lines; columns
// are separated by commas, tabs or spaces; # begins a comment); or numbers, rows separated by semicolons and columns by
// commas.
//
// Text becomes float32. `min_rank` shapes it: 3, a list of one matrix; 2, a matrix always; 1, a vector where it has one
// row or one column; 0, a scalar where it is one number. A .npy file keeps its dtype and shape.
//
// INVALID_ARGUMENT: not such a thing; the message names what is wrong and, in text, where.
absl::StatusOr<v1::Tensor> ReadArray(const std::string& value, int min_rank);

// The same for text alone. `row_separator`: '\n' or ';'.
absl::StatusOr<v1::Tensor> ParseText(absl::string_view text, char row_separator, int min_rank);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CLI_ARRAY_INPUT_H_
