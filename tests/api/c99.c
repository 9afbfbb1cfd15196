/* The header in plain C99, and a call of each kind through it. installed_test.sh compiles it with -pedantic and runs
 * it. */
#include <stdio.h>
#include <string.h>

#include "tessera/tessera.h"

/* The line of what went wrong, 0 if nothing. */
static int test(void) {
  static tessera_problem problem;
  static tessera_error error;
  tessera_line* line = NULL;
  char text[64];

  error.size = sizeof error;
  tessera_problem_init(&problem);
  if (problem.size != sizeof problem || problem.pass != TESSERA_FORWARD) return __LINE__;
  if (tessera_check(&problem, &error) != TESSERA_INVALID || error.code != TESSERA_INVALID) return __LINE__;
  if (strstr(error.message, "heads_q") == NULL) return __LINE__;

  problem.batch = problem.heads_q = problem.heads_kv = problem.len_q = problem.len_k = 1;
  problem.dim = problem.dim_v = 8;
  if (tessera_declare_all(&problem, TESSERA_F32, TESSERA_BSHD, &error) != TESSERA_OK) return __LINE__;
  if (tessera_check(&problem, NULL) != TESSERA_OK) return __LINE__;
  if (tessera_problem_print(&problem, text, sizeof text) != sizeof "forward f32 b1 h1 q1 k1 d8") return __LINE__;
  if (strcmp(text, "forward f32 b1 h1 q1 k1 d8") != 0) return __LINE__;

  if (tessera_line_parse("forward d8", &line, &error) != TESSERA_OK || line == NULL) return __LINE__;
  if (tessera_line_problem(line)->dim != 8) return __LINE__;
  tessera_line_free(line);
  return strcmp(tessera_version(), "") == 0 ? __LINE__ : 0;
}

int main(void) {
  const int line = test();
  if (line != 0) fprintf(stderr, "c99.c:%d does not hold\n", line);
  return line != 0;
}
