/* Loaded into ucx_perftest (LD_PRELOAD): writes the memory that UCX allocates for it.
 *
 * perftest sends a buffer that it never wrote. All pages of such memory are one page of zeros of the
 * kernel's, which never leaves the cache, so its sender reads no memory at all (bench/transfer/README.md).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <ucp/api/ucp.h>

ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *memory)
{
    static ucs_status_t (*map)(ucp_context_h, const ucp_mem_map_params_t *, ucp_mem_h *);
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH};
    ucs_status_t status;

    if (map == NULL)
        map = (ucs_status_t (*)(ucp_context_h, const ucp_mem_map_params_t *, ucp_mem_h *))
            dlsym(RTLD_NEXT, "ucp_mem_map");
    status = map(context, params, memory);
    if (status == UCS_OK && ucp_mem_query(*memory, &attr) == UCS_OK)
        memset(attr.address, 1, attr.length);
    return status;
}
