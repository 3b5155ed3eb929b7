/* A stand-in for the driver's libnvidia-ml.so.1, so that tests break GPUs at will.
 *
 * Build: gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fake_nvml.c
 *        (-DOLD_DRIVER leaves out what drivers of 2022 did not have)
 * State: the file named by $FAKE_NVML_STATE, one key=value a line, read anew at every call:
 *   init=9           what nvmlInit returns               gpus=0 2      the GPUs in the list
 *   2.error=15       every call for GPU 2 returns this   2.power=71000 what a call answers
 *   2.power.error=3  this call returns this              2.hang=1      no call comes back
 *   2.power.hang=1   this call does not come back
 * The declarations restate the driver's public interface as far as it is used here.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int ret;
typedef void *device;
typedef unsigned long long u64;

static double state(const char *key, double otherwise) {
  char line[256];
  size_t n = strlen(key);
  FILE *file = fopen(getenv("FAKE_NVML_STATE") ? getenv("FAKE_NVML_STATE") : "", "r");
  if (!file) return otherwise;
  while (fgets(line, sizeof line, file))
    if (!strncmp(line, key, n) && line[n] == '=') otherwise = strtod(line + n + 1, NULL);
  fclose(file);
  return otherwise;
}

static double of(device d, const char *what, const char *suffix, double otherwise) {
  char key[64];
  snprintf(key, sizeof key, "%d.%s%s", (int)(long)d - 1, what, suffix);
  return state(key, otherwise);
}

static ret answer(device d, const char *what, double otherwise, double *value) {
  while (of(d, "hang", "", 0) || of(d, what, ".hang", 0)) usleep(10000);
  if (of(d, "error", "", 0)) return (ret)of(d, "error", "", 0);
  *value = of(d, what, "", otherwise);
  return (ret)of(d, what, ".error", 0);
}

static int listed(unsigned index) { /* the number of the GPU at an index, -1 past the end */
  char line[256], *at = "0 1", *end;
  FILE *file = fopen(getenv("FAKE_NVML_STATE") ? getenv("FAKE_NVML_STATE") : "", "r");
  while (file && fgets(line, sizeof line, file))
    if (!strncmp(line, "gpus=", 5)) { at = line + 5; break; }
  if (file) fclose(file);
  for (;; at = end) {
    long number = strtol(at, &end, 10);
    if (end == at) return -1;
    if (!index--) return (int)number;
  }
}

ret nvmlInitWithFlags(unsigned flags) { (void)flags; return (ret)state("init", 0); }
ret nvmlShutdown(void) { return 0; }
ret nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "550.00.fake"); return 0; }

ret nvmlDeviceGetCount_v2(unsigned *count) {
  for (*count = 0; listed(*count) >= 0; ++*count) {}
  return 0;
}

ret nvmlDeviceGetHandleByIndex_v2(unsigned index, device *d) {
  double unused;
  int number = listed(index);
  if (number < 0) return 2;
  *d = (device)(long)(number + 1);
  return answer(*d, "handle", 0, &unused);
}

ret nvmlDeviceGetUUID(device d, char *s, unsigned n) {
  snprintf(s, n, "GPU-fake-%ld", (long)d - 1);
  return 0;
}

ret nvmlDeviceGetName(device d, char *s, unsigned n) {
  (void)d;
  snprintf(s, n, "Fake H100");
  return 0;
}

struct pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
};
ret nvmlDeviceGetPciInfo_v3(device d, struct pci *pci) {
  memset(pci, 0, sizeof *pci);
  pci->bus = 0x3a + (unsigned)(long)d;
  return 0;
}

ret nvmlDeviceGetTemperature(device d, int sensor, unsigned *celsius) {
  double v = 0;
  ret r = answer(d, "temperature", 40, &v);
  (void)sensor;
  *celsius = (unsigned)(long)v;
  return r;
}

ret nvmlDeviceGetPowerUsage(device d, unsigned *milliwatt) {
  double v = 0;
  ret r = answer(d, "power", 70000, &v);
  *milliwatt = (unsigned)v;
  return r;
}

struct utilization { unsigned gpu, memory; };
ret nvmlDeviceGetUtilizationRates(device d, struct utilization *u) {
  double v = 0;
  ret r = answer(d, "utilization", 50, &v);
  u->gpu = u->memory = (unsigned)v;
  return r;
}

struct memory { u64 total, free, used; };
ret nvmlDeviceGetMemoryInfo(device d, struct memory *m) {
  double used = 0;
  ret r = answer(d, "used", 1 << 30, &used);
  m->total = (u64)of(d, "total", "", 80.0 * (1 << 30));
  m->used = (u64)used + (1 << 29); /* what the driver keeps counts as used in this one */
  m->free = m->total - m->used;
  return r;
}

struct value {
  unsigned field, scope;
  long long timestamp, latency;
  unsigned type;
  ret status;
  union { unsigned small; u64 large; } is;
};
ret nvmlDeviceGetFieldValues(device d, int count, struct value *values) {
  for (int i = 0; i < count; i++) {
    char key[16];
    double v = 0;
    snprintf(key, sizeof key, "field%u", values[i].field);
    values[i].status = answer(d, key, 0, &v);
    values[i].type = (unsigned)of(d, key, ".type", 1);
    values[i].is.large = (u64)v;
  }
  return (ret)of(d, "error", "", 0);
}

#ifndef OLD_DRIVER
struct temperature { unsigned version; int sensor, celsius; };
ret nvmlDeviceGetTemperatureV(device d, struct temperature *t) {
  double v = 0;
  ret r = answer(d, "temperature", 40, &v);
  t->celsius = (int)v;
  return r;
}

struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
ret nvmlDeviceGetMemoryInfo_v2(device d, struct memory_v2 *m) {
  double used = 0;
  ret r = answer(d, "used", 1 << 30, &used);
  m->total = (u64)of(d, "total", "", 80.0 * (1 << 30));
  m->used = (u64)used;
  m->reserved = 1 << 29;
  m->free = m->total - m->used - m->reserved;
  return r;
}
#endif
