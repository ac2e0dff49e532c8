/* What a native operation of a framework does, in plain C: tests/engine/test_c_api.py compiles and loads it. Functions
 * return 0, or the line of the first check that failed. None of their threads knows Python. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "bindings/c_api.h"

#define CHECK(condition)                                                                     \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, api->last_error()); \
      return __LINE__;                                                                       \
    }                                                                                        \
  } while (0)

static int ends_with(const char* text, const char* end) {
  return strlen(text) >= strlen(end) && strcmp(text + strlen(text) - strlen(end), end) == 0;
}

enum { kAllreduce = 0, kAllgather = 1, kAlltoall = 3, kReducescatter = 4, kSum = 1, kInt32 = 3, kFloat32 = 7 };
enum { kChain = 50 };

typedef struct {
  const HorovodApi* api;
  HorovodEngine* engine;
  int rank, size, result, starts_at_once;
  pthread_mutex_t mutex; /* the callbacks take it, under which other operations are submitted */
  pthread_cond_t changed;
  int completed, failed, unused;
  float value;
  int64_t shape[2];
  HorovodOperation* operation;
} Client;

static HorovodCall call_of(const char* name, int type, const HorovodTensor* tensor) {
  HorovodCall call;
  memset(&call, 0, sizeof(call));
  call.struct_bytes = sizeof(call);
  call.name = name;
  call.type = type;
  call.reduce_op = kSum;
  call.prescale = call.postscale = 1.0;
  call.tensors = tensor;
  call.tensor_count = 1;
  call.tensor_bytes = sizeof(*tensor);
  call.device = -1;
  return call;
}

static HorovodTensor tensor_of(void* data, void* output, int dtype, const int64_t* shape, int dimensions) {
  HorovodTensor tensor = {data, output, dtype, dimensions, shape};
  return tensor;
}

/* -- each operation completes the one before ------------------------------------------------------------------------
 */
static int submit_next(Client* client);

static void on_completed(HorovodOperation* operation, void* context) {
  Client* const client = context;
  const HorovodApi* const api = client->api;
  pthread_mutex_lock(&client->mutex);
  client->completed += 1;
  if (api->error_of(operation)[0] != 0) client->failed = 1;
  if (client->completed < kChain && !client->failed && submit_next(client) != 0) client->failed = 1;
  pthread_cond_signal(&client->changed);
  pthread_mutex_unlock(&client->mutex); /* the last one ends the client, which is on the stack of its thread */
  api->release(operation);
}

static int submit_next(Client* client) {
  char name[32];
  snprintf(name, sizeof(name), "allreduce.chain%d", client->completed);
  const int64_t shape[1] = {1};
  const HorovodTensor tensor = tensor_of(&client->value, &client->value, kFloat32, shape, 1);
  HorovodCall call = call_of(name, kAllreduce, &tensor);
  call.postscale = 0.5;
  call.completed = on_completed;
  call.context = client;
  call.starts_at_once = client->starts_at_once;
  return client->api->submit(client->engine, &call, NULL);
}

static int chain(Client* client) {
  const HorovodApi* const api = client->api;
  client->value = 8;
  pthread_mutex_lock(&client->mutex);
  CHECK(submit_next(client) == HOROVOD_OK);
  while (client->completed < kChain && !client->failed) pthread_cond_wait(&client->changed, &client->mutex);
  pthread_mutex_unlock(&client->mutex);
  CHECK(!client->failed);
  CHECK(client->value == 8); /* the mean of equal values, over and over */
  return 0;
}

/* -- operations that this thread waits for --------------------------------------------------------------------------
 */
static int waiting(Client* client) {
  const HorovodApi* const api = client->api;
  HorovodOperation* operation;
  const int64_t scalar[1] = {1};
  float sum = (float)(client->rank + 1);
  HorovodTensor tensor = tensor_of(&sum, &sum, kFloat32, scalar, 1);
  HorovodCall call = call_of("allreduce.sum", kAllreduce, &tensor);
  call.waits_next = 1;
  CHECK(api->submit(client->engine, &call, &operation) == HOROVOD_OK);
  CHECK(api->wait(operation, -1) == HOROVOD_OK);
  CHECK(api->poll(operation) == 1 && strlen(api->error_of(operation)) == 0);
  CHECK(sum == 3);
  HorovodResult result = {sizeof(result), NULL, 0, 0, 0, NULL, 0, 0, NULL};
  CHECK(api->take_result(operation, 0, &result) == HOROVOD_INVALID_ARGUMENT); /* it is in place */
  api->release(operation);

  /* A caller of a release that knew less of HorovodCall. */
  sum = 1;
  call.struct_bytes = offsetof(HorovodCall, completed);
  call.completed = on_completed; /* not looked at */
  call.name = "allreduce.older";
  CHECK(api->submit(client->engine, &call, &operation) == HOROVOD_OK);
  CHECK(api->wait(operation, 60000000) == HOROVOD_OK && sum == 2);
  api->release(operation);

  /* As many rows as its rank, and one. */
  int32_t rows[4] = {10 + client->rank, 20 + client->rank, 30 + client->rank, 40 + client->rank};
  const int64_t shape[2] = {client->rank + 1, 2};
  tensor = tensor_of(rows, NULL, kInt32, shape, 2);
  call = call_of("allgather.rows", kAllgather, &tensor);
  CHECK(api->submit(client->engine, &call, &operation) == HOROVOD_OK);
  CHECK(api->wait(operation, -1) == HOROVOD_OK);
  CHECK(api->take_result(operation, 0, &result) == HOROVOD_OK);
  api->release(operation); /* the result lives on */
  CHECK(result.dimensions == 2 && result.shape[0] == 3 && result.shape[1] == 2 && result.bytes == 24);
  CHECK(result.dtype == kInt32 && result.device == -1);
  const int32_t gathered[6] = {10, 20, 11, 21, 31, 41};
  CHECK(memcmp(result.data, gathered, sizeof(gathered)) == 0);
  api->release_result(&result);
  CHECK(result.owner == NULL);

  const int64_t four[1] = {4};
  const int32_t splits[2] = {1, 3};
  tensor = tensor_of(rows, NULL, kInt32, four, 1);
  call = call_of("alltoall.rows", kAlltoall, &tensor);
  call.splits = splits;
  call.split_count = 2;
  CHECK(api->submit(client->engine, &call, &operation) == HOROVOD_OK);
  CHECK(api->wait(operation, -1) == HOROVOD_OK);
  const int32_t* received;
  size_t count;
  CHECK(api->received_splits(operation, &received, &count) == HOROVOD_OK && count == 2);
  CHECK(received[0] == (client->rank == 0 ? 1 : 3) && received[1] == received[0]);
  CHECK(api->take_result(operation, 0, &result) == HOROVOD_OK);
  CHECK(((const int32_t*)result.data)[0] == (client->rank == 0 ? 10 : 20));
  CHECK(api->take_result(operation, 0, &result) == HOROVOD_INVALID_ARGUMENT); /* taken */
  api->release_result(&result);
  api->release(operation);

  int32_t ones[3] = {1, 1, 1};
  const int64_t three[1] = {3};
  tensor = tensor_of(ones, NULL, kInt32, three, 1);
  call = call_of("reducescatter.ones", kReducescatter, &tensor);
  CHECK(api->submit(client->engine, &call, &operation) == HOROVOD_OK);
  CHECK(api->wait(operation, -1) == HOROVOD_OK);
  CHECK(api->take_result(operation, 0, &result) == HOROVOD_OK);
  CHECK(result.shape[0] == (client->rank == 0 ? 2 : 1) && ((const int32_t*)result.data)[0] == 2);
  api->release_result(&result);
  api->release(operation);
  return 0;
}

/* -- operations that this thread has waited for ---------------------------------------------------------------------
 */
static void on_told(HorovodOperation* operation, void* context) {
  Client* const client = context;
  pthread_mutex_lock(&client->mutex);
  client->failed = client->api->error_of(operation)[0] != 0;
  client->operation = operation;
  pthread_cond_signal(&client->changed);
  pthread_mutex_unlock(&client->mutex);
}

static int meet(Client* client, const char* name) {
  const HorovodApi* const api = client->api;
  const int64_t scalar[1] = {1};
  float one = 1;
  const HorovodTensor tensor = tensor_of(&one, &one, kFloat32, scalar, 1);
  HorovodCall call = call_of(name, kAllreduce, &tensor);
  HorovodOperation* operation;
  CHECK(api->submit(client->engine, &call, &operation) == HOROVOD_OK);
  CHECK(api->wait(operation, -1) == HOROVOD_OK && one == 2);
  api->release(operation);
  return 0;
}

/* Rank 0 goes before rank 1 has come; rank 1 asks to be told of what is done. */
static int leaving(Client* client) {
  const HorovodApi* const api = client->api;
  const int64_t scalar[1] = {1};
  client->value = 1;
  const HorovodTensor tensor = tensor_of(&client->value, &client->value, kFloat32, scalar, 1);
  HorovodCall call = call_of("allreduce.left", kAllreduce, &tensor);
  call.waits_next = 1;
  HorovodOperation* operation;
  if (client->rank == 1) CHECK(meet(client, "allreduce.first_has_left") == 0);
  CHECK(api->submit(client->engine, &call, &operation) == HOROVOD_OK);
  if (client->rank == 1) {
    CHECK(api->wait(operation, -1) == HOROVOD_OK);
    CHECK(api->tell_when_done(operation, on_told, client) == 0 && client->operation == NULL);
  } else {
    CHECK(api->wait(operation, 1000) == HOROVOD_TIMEOUT);
    CHECK(api->tell_when_done(operation, on_told, client) == 1);
    CHECK(meet(client, "allreduce.first_has_left") == 0);
    pthread_mutex_lock(&client->mutex);
    while (client->operation == NULL) pthread_cond_wait(&client->changed, &client->mutex);
    pthread_mutex_unlock(&client->mutex);
    CHECK(client->operation == operation && !client->failed);
  }
  api->release(operation);
  CHECK(client->value == 2);
  client->operation = NULL;
  return 0;
}

static void on_unused(void* context) {
  Client* const client = context;
  pthread_mutex_lock(&client->mutex);
  client->unused += 1;
  pthread_cond_signal(&client->changed);
  pthread_mutex_unlock(&client->mutex);
}

static int mistakes(Client* client) {
  const HorovodApi* const api = client->api;
  HorovodOperation* operation;
  const int64_t scalar[1] = {1};
  float value = 1;
  HorovodTensor tensor = tensor_of(&value, &value, 99, scalar, 1);
  HorovodCall call = call_of("allreduce.wrong", kAllreduce, &tensor);
  call.unused = on_unused;
  call.context = client;
  CHECK(api->submit(client->engine, &call, &operation) == HOROVOD_INVALID_ARGUMENT);
  CHECK(ends_with(api->last_error(), " 99. [internal]") && operation == NULL);
  CHECK(client->unused == 1);
  tensor.dtype = kFloat32;
  call.process_set = 7;
  CHECK(api->submit(client->engine, &call, &operation) == HOROVOD_INVALID_ARGUMENT);
  CHECK(ends_with(api->last_error(), "[no-such-process-set]") && client->unused == 2);
  call.process_set = 0;
  CHECK(api->submit(client->engine, &call, NULL) == HOROVOD_INVALID_ARGUMENT); /* nobody would know of it */
  tensor.output = NULL;
  CHECK(api->submit(client->engine, &call, &operation) == HOROVOD_INVALID_ARGUMENT);
  CHECK(api->submit(NULL, &call, &operation) == HOROVOD_INVALID_ARGUMENT);
  return 0;
}

static void* in_a_thread(void* context) {
  Client* const client = context;
  client->result = mistakes(client);
  if (client->result == 0) client->result = waiting(client);
  if (client->result == 0) client->result = leaving(client);
  if (client->result == 0) client->result = chain(client);
  return NULL;
}

static void prepare(Client* client, const HorovodApi* api, HorovodEngine* engine, int rank) {
  memset(client, 0, sizeof(*client));
  client->api = api;
  client->engine = engine;
  client->rank = rank;
  client->size = 2;
  pthread_mutex_init(&client->mutex, NULL);
  pthread_cond_init(&client->changed, NULL);
}

static void* chain_in_a_thread(void* context) {
  Client* const client = context;
  client->result = chain(client);
  return NULL;
}

/* The chain alone. The caller has counted how often the engine waited for more operations. */
int client_chain(const HorovodApi* api, HorovodEngine* engine, int rank, int starts_at_once) {
  Client client;
  pthread_t thread;
  prepare(&client, api, engine, rank);
  client.starts_at_once = starts_at_once;
  CHECK(pthread_create(&thread, NULL, chain_in_a_thread, &client) == 0);
  pthread_join(thread, NULL);
  return client.result;
}

int client_run(const HorovodApi* api, HorovodEngine* engine, int rank) {
  Client client;
  pthread_t thread;
  CHECK(api->version == HOROVOD_API_VERSION && api->table_bytes >= sizeof(HorovodApi));
  CHECK(api->rank(engine) == rank);
  prepare(&client, api, engine, rank);
  CHECK(pthread_create(&thread, NULL, in_a_thread, &client) == 0);
  pthread_join(thread, NULL);
  return client.result;
}

/* -- an operation in flight when its epoch ends ---------------------------------------------------------------------
 */
static Client g_left;

static void on_left(HorovodOperation* operation, void* context) {
  Client* const client = context;
  pthread_mutex_lock(&client->mutex);
  client->completed += 1;
  client->failed = strstr(client->api->error_of(operation), "gave up") != NULL;
  client->operation = operation;
  pthread_cond_signal(&client->changed);
  pthread_mutex_unlock(&client->mutex);
}

int client_leave_in_flight(const HorovodApi* api, HorovodEngine* engine) {
  prepare(&g_left, api, engine, 0);
  api->retain_engine(engine);
  g_left.shape[0] = 1;
  const HorovodTensor tensor = tensor_of(&g_left.value, &g_left.value, kFloat32, g_left.shape, 1);
  HorovodCall call = call_of("allreduce.never", kAllreduce, &tensor);
  call.completed = on_left;
  call.unused = on_unused;
  call.context = &g_left;
  HorovodOperation* operation;
  CHECK(api->submit(engine, &call, &operation) == HOROVOD_OK);
  CHECK(api->poll(operation) == 0 && api->wait(operation, 1000) == HOROVOD_TIMEOUT);
  call.name = "allreduce.abandoned";
  call.completed = NULL;
  CHECK(api->submit(engine, &call, &operation) == HOROVOD_OK);
  api->release(operation); /* it goes on, and its memory is in use */
  CHECK(g_left.unused == 0);
  return 0;
}

int client_after_the_end(void) {
  const HorovodApi* const api = g_left.api;
  pthread_mutex_lock(&g_left.mutex);
  while (g_left.completed == 0) pthread_cond_wait(&g_left.changed, &g_left.mutex);
  pthread_mutex_unlock(&g_left.mutex);
  CHECK(g_left.completed == 1 && g_left.failed);
  CHECK(api->wait(g_left.operation, 0) == HOROVOD_ABORTED);
  CHECK(strstr(api->last_error(), "gave up") != NULL);
  api->release(g_left.operation);
  return 0;
}

int client_after_the_engine(void) {
  const HorovodApi* const api = g_left.api;
  HorovodOperation* operation;
  const HorovodTensor tensor = tensor_of(&g_left.value, &g_left.value, kFloat32, g_left.shape, 1);
  HorovodCall call = call_of("allreduce.late", kAllreduce, &tensor);
  CHECK(g_left.unused == 2); /* with the engine the last use of the memory has ended */
  CHECK(api->submit(g_left.engine, &call, &operation) == HOROVOD_ABORTED);
  CHECK(ends_with(api->last_error(), "[shut-down]"));
  api->release_engine(g_left.engine);
  return 0;
}

int client_has_current(const HorovodApi* api) {
  HorovodEngine* const engine = api->current_engine();
  api->release_engine(engine);
  return engine != NULL;
}
