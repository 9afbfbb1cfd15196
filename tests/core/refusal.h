// What a call refuses with, for tables of sentences.
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "core/error.h"

namespace tessera::core {

struct Refusal {
  int code = TESSERA_OK;
  std::string message;
};
template <class Call>
Refusal refusal(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return {e.code, e.what()};
  }
  return {};
}

inline void expect_says(const Refusal& got, int code, const std::string& fragment) {
  EXPECT_EQ(got.code, code) << "wanted: " << fragment << "\nmessage: " << got.message;
  EXPECT_NE(got.message.find(fragment), std::string::npos) << "wanted: " << fragment << "\nmessage: " << got.message;
}

}  // namespace tessera::core
