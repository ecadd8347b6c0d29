export default {};
export const editor = {};
export const languages = {};
export const monaco = {};
