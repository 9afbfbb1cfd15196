/* Causal attention with grouped heads on the CPU, from C.
 *
 * All queries are 0, so every key that a row sees weighs the same, and V holds j + 100 g at key j of KV head g: row i
 * of query head h must become i / 2 + 100 (h / 4), the mean of what it sees, and its lse log(i + 1). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <tessera/tessera.h>

enum { heads = 8, heads_kv = 2, group = heads / heads_kv, length = 128, dim = 64 };

static float q[length][heads][dim], k[length][heads_kv][dim], v[length][heads_kv][dim];
static float out[length][heads][dim], lse[heads][length];

static tessera_error error = {sizeof error, 0, ""};

static void must(int32_t code) {
  if (code == TESSERA_OK) return;
  fprintf(stderr, "%s\n", error.message);
  exit(code);
}

static tessera_problem causal_problem(void) {
  tessera_problem problem;
  tessera_problem_init(&problem);
  problem.batch = 1;
  problem.heads_q = heads;
  problem.heads_kv = heads_kv;
  problem.len_q = problem.len_k = length;
  problem.dim = problem.dim_v = dim;
  problem.mask.causal = 1;
  problem.mask.corner = TESSERA_BOTTOM_RIGHT;
  must(tessera_declare_all(&problem, TESSERA_F32, TESSERA_BSHD, &error));
  return problem;
}

static void fill(void) {
  for (int j = 0; j < length; ++j)
    for (int g = 0; g < heads_kv; ++g)
      for (int d = 0; d < dim; ++d) {
        k[j][g][d] = (float)(j % 7);
        v[j][g][d] = (float)(j + 100 * g);
      }
}

static void run(const tessera_plan* plan, int64_t workspace_bytes) {
  tessera_bindings bindings;
  tessera_bindings_init(&bindings);
  bindings.data[TESSERA_Q] = q;
  bindings.data[TESSERA_K] = k;
  bindings.data[TESSERA_V] = v;
  bindings.data[TESSERA_OUT] = out;
  bindings.data[TESSERA_LSE] = lse;
  bindings.workspace = aligned_alloc(64, (size_t)workspace_bytes);
  bindings.workspace_bytes = workspace_bytes;
  must(tessera_run(plan, &bindings, NULL, &error));
  free(bindings.workspace);
}

static int near(const char* what, double got, double expected) {
  printf("%-10s %.6f, in closed form %.6f\n", what, got, expected);
  return fabs(got - expected) <= 1e-5 * fabs(expected);
}

int main(void) {
  /* What is wrong is said in words. */
  tessera_problem wrong = causal_problem();
  wrong.heads_kv = 3;
  if (tessera_check(&wrong, &error) != TESSERA_INVALID) return 1;
  printf("refused    %s\n", error.message);

  const tessera_problem problem = causal_problem();
  tessera_device host;
  host.size = sizeof host;
  must(tessera_device_find("host", &host, &error));
  tessera_plan* plan;
  must(tessera_plan_make(&problem, &host, NULL, &plan, &error));

  char text[4096];
  tessera_plan_print(plan, text, sizeof text);
  printf("%s", text);
  tessera_plan_facts facts;
  facts.size = sizeof facts;
  must(tessera_plan_get(plan, &facts, &error));

  fill();
  run(plan, facts.workspace_bytes);
  tessera_plan_free(plan);

  double sum = 0, expected = 0, lse_sum = 0, lse_expected = 0;
  for (int i = 0; i < length; ++i)
    for (int h = 0; h < heads; ++h) {
      for (int d = 0; d < dim; ++d) sum += out[i][h][d];
      expected += dim * (0.5 * i + 100.0 * (h / group));
      lse_sum += lse[h][i];
      lse_expected += log(i + 1.0);
    }
  const int right = near("sum of out", sum, expected) & near("sum of lse", lse_sum, lse_expected);
  return right ? 0 : TESSERA_WRONG;
}
